"""A byte-level BPE tokenizer in the header of a GGUF file: llama.cpp then splits and merges text as Python does.

llama.cpp has the patterns for splitting text in its own code; a file only names one. Three can be written here:
those of GPT-2, Llama 3 and Qwen. A tokenizer that splits text in another way raises an error.
"""

import json
from dataclasses import dataclass
from typing import Any

from ..errors import SLTError
from .tokenizer import refuse_unknown_ids

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = rf"{_ENGLISH}|\p{{N}}{{1,3}}|{_REST}"
QWEN = rf"{_ENGLISH}|\p{{N}}|{_REST}"
# llama.cpp's name, by the pattern and by ignore_merges: whether a word that is a token is used without merging.
SPLITS = {
    ("", False): "gpt-2",
    (LLAMA_3, True): "llama-bpe",
    (LLAMA_3, False): "smaug-bpe",
    (QWEN, False): "qwen2",
}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # kinds of tokens
_HINT = "llama.cpp can only use byte-level BPE that splits text as GPT-2, Llama 3 or Qwen do"


@dataclass(frozen=True)
class Vocabulary:
    """What llama.cpp needs to know about a byte-level BPE tokenizer.

    Args:
        tokens (`list[str]`):
            The tokens by id, in the alphabet of byte-level BPE.
        kinds (`list[int]`):
            The kind of each token: `NORMAL`, `CONTROL`, `USER_DEFINED` or `UNUSED`.
        merges (`list[str]`):
            The merges in order, as two tokens with a space between them.
        split (`str`):
            llama.cpp's name for how text is split, one of the values of `SPLITS`.
        bos (`int`):
            Id of the start-of-text token. If the tokenizer has none, the id of the end-of-text token.
        eos (`int`):
            Id of the end-of-text token.
        adds_bos (`bool`):
            Whether the tokenizer puts the start-of-text token before a text.
        normalizes (`bool`, defaults to `False`):
            Whether the tokenizer converts text to Unicode's NFC, which llama.cpp does not do.
    """

    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    split: str
    bos: int
    eos: int
    adds_bos: bool
    normalizes: bool = False

    def write(self, writer: Any, rows: int) -> None:
        """Write the vocabulary into the header of a file. Rows of the table without a token are marked as unused.

        Args:
            writer (`gguf.GGUFWriter`):
                The writer of the file.
            rows (`int`):
                The rows of the model's table of tokens.
        """
        unused = range(len(self.tokens), rows)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.split)
        writer.add_token_list([*self.tokens, *(f"[PAD{index}]" for index in unused)])
        writer.add_token_types([*self.kinds, *(UNUSED for _ in unused)])
        writer.add_token_merges(self.merges)
        writer.add_bos_token_id(self.bos)
        writer.add_eos_token_id(self.eos)
        writer.add_add_bos_token(self.adds_bos)


def read_vocabulary(tokenizer: Any, rows: int) -> Vocabulary:
    """Read the vocabulary of a tokenizer, which must split and merge text as llama.cpp can.

    Args:
        tokenizer (`PreTrainedTokenizerFast`):
            The tokenizer.
        rows (`int`):
            The rows of the model's table: the tokenizer may not have more tokens.

    Returns:
        [`Vocabulary`]: what llama.cpp needs of it.

    Raises:
        [`SLTError`]: if llama.cpp would give other tokens. The message names the reason.
    """
    refuse_unknown_ids(tokenizer, rows)
    facts = json.loads(tokenizer.backend_tokenizer.to_str())
    model, normalizer = facts["model"], facts["normalizer"]
    if model["type"] != "BPE":
        raise SLTError(f"a tokenizer of {model['type']}; {_HINT}")
    split = _name_of_split(facts["pre_tokenizer"] or {}, bool(model.get("ignore_merges")))
    odd = [name for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(name)]
    odd += ["byte_fallback"] if model.get("byte_fallback") else []
    normalizes = split == "qwen2" and normalizer == {"type": "NFC"}  # all of Qwen's have this
    odd += ["normalizer"] if normalizer and not normalizes else []
    added = facts["added_tokens"]
    odd += [name for name in ("lstrip", "rstrip", "single_word") for token in added if token[name]]
    if odd:
        raise SLTError(f"a tokenizer with {odd[0]}; {_HINT}")
    if not model["merges"]:
        raise SLTError("a tokenizer without merges, which llama.cpp does not load; train one of more tokens")
    if tokenizer.eos_token_id is None:
        raise SLTError("the tokenizer has no end-of-text token; set tokenizer.eos_token and save it again")

    ids = tokenizer.get_vocab()
    size = max(ids.values()) + 1
    tokens, kinds = [f"[PAD{index}]" for index in range(size)], [UNUSED] * size
    for token, index in ids.items():
        tokens[index], kinds[index] = token, NORMAL
    for token in added:
        kinds[ids[token["content"]]] = CONTROL if token["special"] else USER_DEFINED
    eos = tokenizer.eos_token_id
    bos = eos if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    around = tokenizer.backend_tokenizer.encode("", add_special_tokens=True).ids
    if around not in ([], [bos]):
        raise SLTError(f"a tokenizer that puts tokens {around} around a text; {_HINT}")
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    return Vocabulary(tokens, kinds, merges, split, bos, eos, bool(around), normalizes)


def _name_of_split(before: dict[str, Any], ignore_merges: bool) -> str:
    """Return llama.cpp's name for how a pre-tokenizer splits text. Raise `SLTError` if it has none."""
    parts = before["pretokenizers"] if before.get("type") == "Sequence" else [before]
    *first, last = parts
    if last.get("type") != "ByteLevel":
        raise SLTError(f"a tokenizer of BPE after {before.get('type', 'no splitting')}; {_HINT}")
    if last.get("add_prefix_space"):
        raise SLTError(f"a tokenizer with add_prefix_space; {_HINT}")
    pattern = ""
    if first:
        pattern = first[0].get("pattern", {}).get("Regex", "another pattern")
        plain = {"type": "Split", "behavior": "Isolated", "invert": False}
        if len(first) > 1 or any(first[0].get(name) != value for name, value in plain.items()):
            raise SLTError(
                f"a tokenizer with a Sequence that is not a single Split (behavior isolated); {_HINT}"
            )
    if last.get("use_regex", True) == bool(first):
        raise SLTError(f"a tokenizer with use_regex {last.get('use_regex', True)}; {_HINT}")
    found = SPLITS.get((pattern, ignore_merges))
    if found is None and any(pattern == known for known, _ in SPLITS):
        raise SLTError(f"a tokenizer with ignore_merges {ignore_merges} and this pattern; {_HINT}")
    if found is None:
        raise SLTError(f"a tokenizer that splits by {pattern!r}; {_HINT}")
    return found
