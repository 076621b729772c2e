"""Helpers for tests with llama.cpp: a server in a separate process, expected results, and reading GGUF files back."""

import math
import sys
from pathlib import Path

import numpy as np
import torch

RECIPES = Path(__file__).parents[1] / "recipes"
sys.path.insert(0, str(RECIPES))
from llama_server import LlamaServer  # noqa: E402

TEXT = (
    "A ticket is a seed and a mask. The seed draws every weight, and nothing changes it. The mask says which "
    "weights stay and which ones go. So a small file holds a large model: whoever has the seed has the "
    "weights, and whoever has the mask has what was learned. "
)
UNSEEN = "The seed says which weights go, and a small mask changes nothing of it. Whoever stays was learned!"
ODD = [
    "", " ", "  ", "\n", "\r\n\t ", "a  b   c ", " leading", "trailing  ", "it's they'll I've I'm he'd CAN'T",
    "x'S 'tis ''s", "3.14159 1,000,000 ²³ ½ ١٢٣ 一二三", "déjà vu, naïve, Ångström", "ﬁ ﬂ", "ß",
    "Привет, мир", "שלום", "नमस्ते", "日本語のテキスト", "한국어", "🙂🙃 👩\u200d👩\u200d👧 🏳️\u200d🌈",
    "\u200b\u200d\ufeff", "\u00a0\u2003\u3000", "a\u0301\u0302", "\x00\x01\x7f",
    "<|endoftext|>", "a<|endoftext|>b <|endoftext|>", "<|endof", "||###$$%%",
    "def f(x):\n    return x ** 2  # comment\n", "\ud7ff\ue000\uffff", "\U0001d49c\U0001d4c1", "a" * 300,
    " " * 70 + "x", "1\n\n\n2 \n 3!\n\n?", "12345678 x1y22", ",word\tword\r\n",
]  # fmt: skip
POSITIONS = 128


def odd_texts(count: int) -> list[str]:
    """Return texts that tokenizers split differently: those above, and random mixtures of their letters."""
    generator = np.random.default_rng(0)
    letters = [*"".join(ODD), *"ab'S 1\n"]
    return [*ODD, *("".join(generator.choice(letters, 20)) for _ in range(count))]


class Llama(LlamaServer):
    """A file that is loaded in llama.cpp, with float32 keys and values, on one thread."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, n_ctx=POSITIONS, exact=True)

    def greedy(self, ids: list[int], new: int) -> list[int]:
        options = {"n_predict": new, "temperature": 0, "return_tokens": True}
        return self.ask("completion", prompt=ids, **options)["tokens"]

    def log_probabilities(self, ids: list[int], size: int) -> torch.Tensor:
        """Return the log-probabilities of every token after every prefix of `ids`: (length, size)."""
        # Any next token will do, but it must be a whole letter: "a".
        options = {"n_predict": 1, "n_probs": size, "temperature": 0, "logit_bias": [["a", 1e4]]}
        found = torch.empty(len(ids), size)
        for end in range(len(ids)):
            answer = self.ask("completion", prompt=ids[: end + 1], **options)
            for one in answer["completion_probabilities"][0]["top_logprobs"]:
                found[end, one["id"]] = one["logprob"]
        return found


@torch.no_grad()
def expected_log_probabilities(model, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def perplexity(logs: torch.Tensor, ids: list[int]) -> float:
    return math.exp(-logs[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean().item())


def read_types(path: Path) -> dict[str, str]:
    """Return the type of every tensor, from the reader of the gguf package. It does not support q2_0."""
    import gguf

    return {one.name: one.tensor_type.name.lower() for one in gguf.GGUFReader(path).tensors}


def read_file(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Return type and weights of every tensor, from the reader of the gguf package. It cannot read q1_0 and q2_0."""
    import gguf

    return {
        one.name: (one.tensor_type.name.lower(), gguf.dequantize(one.data, one.tensor_type))
        for one in gguf.GGUFReader(path).tensors
    }


def learn(model, words, steps: int):
    """Train a model on the text and return its ticket, which writes words and not always the same token."""
    torch.manual_seed(0)
    for name, values in model.named_parameters():
        if name.endswith(("values", "scale")):  # scales and gains start at one
            one_row = len(values) == 1
            torch.nn.init.uniform_(values, 0.5, 1.5) if one_row else torch.nn.init.normal_(values, std=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    ids = torch.tensor(words(3 * TEXT, verbose=False).input_ids)
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - 64, (4,)).tolist()
        rows = torch.stack([ids[start : start + 64] for start in starts])
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.to_ticket().eval()


def save(folder: Path, model, words) -> Path:
    """Write a ticket with its tokenizer."""
    model.save_ticket(folder)
    words.save_pretrained(folder)
    return folder
