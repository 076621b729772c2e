"""Text -> blocks: against naive packing, across sources, with damaged caches and wrong arguments."""

import dataclasses
import hashlib
import json
import os
import pickle
import random
import re
import subprocess
import sys
import types
from pathlib import Path

import datasets
import numpy as np
import pytest
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from hf_slt.text import blocks as data
from hf_slt.text import tokenizer as tokenizers
from hf_slt.text.blocks import DataArguments, StreamedBlocks, load_blocks, pack_beginning
from hf_slt.text.corpus import DataError, _prose, digest_documents, embedded_corpus, iterate_texts, read_files
from hf_slt.text.splits import halve_texts, split_texts
from hf_slt.text.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer
from hf_slt.text.tokens import ArrowBlocks, Tokenise, tokenise_cached

ROOT = Path(__file__).parents[2]


def make_documents(count: int, words: list[str], seed: int = 0) -> list[str]:
    choose = random.Random(seed)
    return [" ".join(choose.choices(words, k=choose.randint(1, 60))) + f" {i}\n" for i in range(count)]


ASCII = make_documents(150, ["mask", "seed", "ticket", "density", "score,", "of the", "weights\n\n", "a"])
UNICODE = make_documents(40, ["é", "🙂", "日本語", "naïve", "mask", "ﬁn  ", "\t"])


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(ASCII, vocab_size=300, model_max_length=32)


@pytest.fixture(autouse=True)
def private_caches(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(data, "HF_HOME", str(tmp_path / "home"))


def write(folder: Path, name: str, documents: list[str], column: str = "text") -> str:
    path = folder / name
    if path.suffix == ".jsonl":
        path.write_text(
            "".join(json.dumps({column: text, "id": i}) + "\n" for i, text in enumerate(documents))
        )
    elif path.suffix == ".parquet":
        rows = {column: documents, "id": list(range(len(documents)))}
        datasets.Dataset.from_dict(rows).to_parquet(path)
    else:
        path.write_text("".join(documents))
    return str(path)


def naive_ids(documents: list[str], tokenizer, end_of_text: bool = True) -> list[int]:
    ids = []
    for text in documents:
        ids += tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] * end_of_text
    return ids


# ---------------------------------------------------------------------------- packing


def texts_of(documents: list[str]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": documents})


def split(documents: list[str], *options) -> tuple[list[str], list[str], str]:
    train, validation, how = split_texts(texts_of(documents), *options)
    return list(train["text"]), list(validation["text"]), how


@pytest.mark.parametrize("end_of_text", [True, False])
@pytest.mark.parametrize("documents", [ASCII, UNICODE], ids=["ascii", "unicode"])
def test_packing_is_concatenation_and_reshape(documents, end_of_text, tokenizer, tmp_path):
    texts, tokenise = texts_of(documents), Tokenise.by(tokenizer, end_of_text)
    ids = naive_ids(documents, tokenizer, end_of_text)
    rows, digest = tokenise_cached(texts, tokenise, tmp_path, 2, "text")  # two processes, two files
    assert digest == digest_documents(documents)
    assert len(list(tmp_path.glob("tokens-*.arrow"))) == 2
    for block_size in (2, 7, 32, 1000):
        blocks = ArrowBlocks(rows, block_size)
        whole = len(ids) // block_size * block_size
        assert np.asarray(blocks).ravel().tolist() == ids[:whole]
        # In byte-level BPE a token is spelled with one character per byte: an exact count, found another way.
        covered = [token for token in ids[:whole] if token != tokenizer.eos_token_id]
        exact = sum(len(token) for token in tokenizer.convert_ids_to_tokens(covered))
        found = blocks.bytes(texts, tokenise)
        assert found == exact if documents is ASCII else abs(found - exact) <= 3
        copied = pickle.loads(pickle.dumps(blocks))  # as a DataLoader's worker has it
        assert np.array_equal(copied[[0, -1]], blocks[[0, -1]])


def test_bytes_are_right_after_every_block(tokenizer):
    for count in range(1, 40):
        blocks = pack_beginning(texts_of(ASCII), tokenizer, 5, count)
        text = tokenizer.decode(np.asarray(blocks.array).ravel(), skip_special_tokens=True)
        assert (len(blocks), blocks.bytes) == (count, len(text.encode()))


def test_long_documents_are_tokenised_in_pieces_without_loss(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizers, "PIECE", 50)
    documents = ["".join(ASCII[:20]), "x" * 400, "short"]
    blocks = pack_beginning(texts_of(documents), tokenizer, 1, 10**6)
    assert len(blocks.array.rows) > 10
    assert tokenizer.decode(np.asarray(blocks.array).ravel()) == END_OF_TEXT.join(documents) + END_OF_TEXT
    assert blocks.bytes == sum(len(text) for text in documents)


def test_text_that_spells_end_of_text_does_not_end_a_document(tokenizer):
    blocks = pack_beginning(texts_of([f"a {END_OF_TEXT} b", "c"]), tokenizer, 1, 10**6)
    ids = np.asarray(blocks.array).ravel()
    assert (ids == tokenizer.eos_token_id).sum() == 2
    assert tokenizer.decode(ids) == f"a {END_OF_TEXT} b{END_OF_TEXT}c{END_OF_TEXT}"


# ---------------------------------------------------------------------------- tokenizer and embedded corpus


def test_tokenizer_keeps_every_text_and_saves(tokenizer, tmp_path):
    assert len(tokenizer) == 300
    assert tokenizer.eos_token == tokenizer.bos_token == tokenizer.pad_token == END_OF_TEXT
    assert tokenizer.model_max_length == 32
    tokenizer.save_pretrained(tmp_path / "tok")
    for again in (load_tokenizer(str(tmp_path / "tok")), AutoTokenizer.from_pretrained(tmp_path / "tok")):
        for text in ["", " a  b\n\n\tc ", "é🙂日本語\x00\u202e", *UNICODE[:5]]:
            ids = tokenizer(text)["input_ids"]
            assert again(text)["input_ids"] == ids
            assert again.decode(ids) == text


def test_embedded_corpus_and_tokenizer_are_the_same_in_another_process():
    documents = embedded_corpus()
    assert 2e6 < sum(len(text.encode()) for text in documents) < 6e6  # about 3 MB in any version
    assert len(set(documents)) > 0.99 * len(documents)
    code = """
import hashlib, sys
sys.modules["turtle"] = None  # importing it would now fail
from hf_slt.text.corpus import digest_documents, embedded_corpus
from hf_slt.text.blocks import train_tokenizer
tokenizer = train_tokenizer(embedded_corpus()[:100], 600, 64)
assert "antigravity" not in sys.modules and "this" not in sys.modules
print(digest_documents(embedded_corpus()))
print(hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest())
"""
    environment = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    here = train_tokenizer(documents[:100], 600, 64).backend_tokenizer.to_str()
    assert done.stdout.split() == [digest_documents(documents), hashlib.sha256(here.encode()).hexdigest()]


def test_prose_of_a_source_is_its_docstrings_and_longer_comments():
    source = '''# A comment of eight words, over two lines,
# is kept as it is.
"""\\
Module."""
x = "# no comment, \'\'\' no docstring, in spite of its eight words"  # nor is this comment, which trails
TEXT = """no docstring, since a value"""
class A(B):
    r"""First line.

    Deeper.
    """
    # short comment
    async def f(self, a: int = 3,
                *rest) -> None:
        \'\'\'Says """so""".\'\'\'
'''
    assert _prose(source).split("\n\n") == [
        "A comment of eight words, over two lines,\nis kept as it is.",
        "Module.",
        "A(B)",
        "First line.",
        "Deeper.",
        "f(self, a: int = 3,\n                *rest)",
        'Says """so""".',
    ]


def test_default_arguments_give_blocks_of_the_embedded_corpus(tmp_path):
    corpus = load_blocks(DataArguments(cache_dir=str(tmp_path)))
    assert corpus.source == "embedded corpus"
    assert len(corpus.tokenizer) == 2048
    assert corpus.train.array.shape[1] == 128
    assert corpus.train.array[0].base is not None  # a view of the mapped file, no copy
    assert corpus.train.array.size > 300_000
    share = corpus.validation.bytes / (corpus.validation.bytes + corpus.train.bytes)
    assert 0.02 < share < 0.08
    assert corpus.digest in corpus.summary()
    assert 2 < corpus.train.bytes_per_token < 5


def test_digest_knows_boundaries_and_order():
    assert digest_documents(["ab", "c"]) != digest_documents(["a", "bc"]) != digest_documents(["bc", "a"])
    expected = hashlib.sha256(b"\0\0\0\0\0\0\0\2ab").hexdigest()
    assert digest_documents(["ab"]) == expected


# ---------------------------------------------------------------------------- splits


def test_many_documents_split_by_hash():
    documents = make_documents(4000, ["a", "b", "c"])
    train, validation, how = split(documents, 0.05)
    assert "hash" in how
    assert sorted(train + validation) == sorted(documents)
    assert 140 < len(validation) < 260  # 200 +- 4.4 deviations
    shuffled = random.Random(1).sample(documents, len(documents))
    assert set(split(shuffled, 0.05)[1]) == set(validation)  # not a matter of place


def test_few_documents_split_at_a_line_near_their_end():
    documents = ["".join(f"line {i}\n" for i in range(100)), "no line break at all " * 50]
    train, validation, how = split(documents, 0.05)
    assert "2 documents" in how
    assert [a + b for a, b in zip(train, validation, strict=True)] == documents
    assert train[0].endswith("\n")
    assert 0.03 < len(validation[0]) / len(documents[0]) < 0.07


def test_a_test_part_is_half_of_what_validates_and_changes_nothing_else(tmp_path):
    options = {"train_files": [write(tmp_path, "a.jsonl", ASCII)], "vocab_size": 300, "block_size": 16}
    usual = load_blocks(DataArguments(**options))
    three = load_blocks(DataArguments(**options), test_part=True)
    assert usual.test is None
    assert np.array_equal(three.train.array[:], usual.train.array[:])
    held_out = {*map(bytes, three.validation.array[:])}, {*map(bytes, three.test.array[:])}
    assert not held_out[0] & held_out[1]
    assert abs(len(three.validation) + len(three.test) - len(usual.validation)) <= 1
    assert three.digest != usual.digest
    streamed = load_blocks(DataArguments(**options, streaming=True), test_part=True)
    assert np.array_equal(streamed.test.array[:], three.test.array[:])
    fewer = load_blocks(DataArguments(**options, train_blocks=3, validation_blocks=2), test_part=True)
    assert np.array_equal(fewer.train.array[:], usual.train.array[:3])
    assert (len(fewer.validation), len(fewer.test)) == (2, 2)


def test_lines_of_one_text_split_at_the_end():
    lines = [f"line {i}\n" for i in range(200)]
    train, validation, how = split(lines, 0.05, True)
    assert (train, validation) == (lines[:190], lines[190:])
    assert "last rows" in how


UNEVEN = {
    "a title and one long line": ["A title\n" + "word " * 12_000],
    "a short and a long line": ["a" * 10_000 + "\n" + "b" * 48_000],
    "two documents": ["a" * 10_000, "b" * 48_000],
    # By its hash the last one validates, and it is most of the text; or a few words do, and hardly any.
    "one long among many": [*(f"{i} few words" for i in range(150)), "1 " * 50_000],
    "many short that validate": [*(f"{i} few words" for i in range(150)), "2 " * 50_000],
}


@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("kind", UNEVEN)
def test_uneven_documents_are_split_by_length(kind, lines):
    documents = UNEVEN[kind]
    train, validation, how = split(documents, 0.05, lines)
    assert "each document" in how
    assert [a + b for a, b in zip(train, validation, strict=True)] == documents
    share = sum(map(len, validation)) / sum(map(len, documents))
    assert 0.04 < share < 0.08


def test_held_out_text_is_halved(tmp_path):
    path = write(tmp_path, "a.jsonl", ASCII)
    options = {"train_files": [path], "vocab_size": 300, "block_size": 2}
    whole, halves = (load_blocks(DataArguments(**options), test_part=part) for part in (False, True))
    assert np.array_equal(whole.train.array[:], halves.train.array[:])
    held_out = split(ASCII, 0.05)[1]
    for part, first in ((halves.validation, 0), (halves.test, 1)):
        ids = naive_ids(held_out[first::2], whole.tokenizer)
        assert part.array[:].ravel().tolist() == ids[: part.array.size]
        assert part.array.size > len(ids) - 2
    first, second = halve_texts(texts_of(["one\ntwo\n", "three"]))
    assert (list(first["text"]), list(second["text"])) == (["one\n", "th"], ["two\n", "ree"])


def test_the_run_says_what_validates(tmp_path):
    path = write(tmp_path, "a.txt", ["".join(ASCII)])
    options = {"train_files": [path], "vocab_size": 300, "block_size": 16}
    assert (
        "the last 10.0% of each document"
        in load_blocks(DataArguments(**options, validation_fraction=0.1)).summary()
    )
    assert "text of its own" in load_blocks(DataArguments(**options, validation_files=[path])).summary()


# ---------------------------------------------------------------------------- sources


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_files_give_the_documents_written(suffix, streaming, tmp_path):
    path = write(tmp_path, f"a{suffix}", [*ASCII, ""], column="body")
    documents = read_files([path], "body", streaming=streaming)
    assert list(iterate_texts(documents)) == ASCII == list(iterate_texts(documents))  # without the empty one


def test_text_files_by_glob_and_unit(tmp_path):
    write(tmp_path, "b.txt", ["one\n", "two\n\n", "é\n"])
    write(tmp_path, "a.txt", ["first"])
    pattern = [str(tmp_path / "*.txt")]
    assert list(iterate_texts(read_files(pattern))) == ["first", "one\ntwo\n\né\n"]
    assert list(iterate_texts(read_files(pattern, sample_by="line"))) == [
        "first",
        "one\n",
        "two\n",
        "\n",
        "é\n",
    ]
    assert list(iterate_texts(read_files(pattern, sample_by="paragraph"))) == ["first", "one\ntwo", "é\n"]


def test_a_folder_stands_for_the_files_in_it(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deeper.txt").mkdir(parents=True)
    write(folder, "b.txt", ["two"])
    write(folder, "a.MD", ["one"])
    (folder / "notes.docx").write_bytes(b"no text")
    assert list(iterate_texts(read_files([str(folder)]))) == ["one", "two"]
    with pytest.raises(DataError, match=r"file is in the folder '.*deeper.txt'"):
        read_files([str(folder / "deeper.txt")])


def test_a_changed_file_is_read_anew(tmp_path):
    path = write(tmp_path, "a.txt", ["old text"])
    assert list(iterate_texts(read_files([path]))) == ["old text"]
    write(tmp_path, "a.txt", ["new text, longer"])
    assert list(iterate_texts(read_files([path]))) == ["new text, longer"]


def test_streaming_equals_loading(tmp_path):
    options = {"train_files": [write(tmp_path, "a.jsonl", ASCII)], "vocab_size": 300, "block_size": 16}
    loaded = load_blocks(DataArguments(**options))
    streamed = load_blocks(DataArguments(**options, streaming=True))
    rows = [block["input_ids"] for block in streamed.train]
    assert np.array_equal(np.stack(rows), np.asarray(loaded.train.array))
    assert np.array_equal(streamed.validation.array[:], loaded.validation.array[:])
    assert streamed.validation.bytes == loaded.validation.bytes
    assert loaded.tokenizer.get_vocab() == streamed.tokenizer.get_vocab()
    assert streamed.digest is None
    assert "streamed" in streamed.summary()
    assert [len(b["input_ids"]) for b in DataLoader(streamed.train, batch_size=len(rows))] == [len(rows)]
    # Two workers share the stream: together each block once.
    shared = DataLoader(streamed.train, batch_size=None, num_workers=2)
    assert sorted(b["input_ids"].tolist() for b in shared) == sorted(row.tolist() for row in rows)


def test_blocks_feed_a_data_loader(tmp_path):
    corpus = load_blocks(
        DataArguments(train_files=[write(tmp_path, "a.jsonl", ASCII)], vocab_size=300, block_size=16)
    )
    batches = list(DataLoader(corpus.train, batch_size=8))
    ids = np.concatenate([batch["input_ids"].numpy() for batch in batches])
    assert np.array_equal(ids, corpus.train.array[:])
    assert ids.dtype == np.int64
    assert all((batch["labels"] == batch["input_ids"]).all() for batch in batches)
    assert corpus.train[2:5]["input_ids"].shape == (3, 16)


def test_data_set_folder_with_splits_and_pretrained_tokenizer(tokenizer, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder, "train.jsonl", ASCII)
    write(folder, "validation.jsonl", UNICODE)
    tokenizer.save_pretrained(tmp_path / "tok")
    options = {"dataset": str(folder), "tokenizer": str(tmp_path / "tok"), "block_size": 8}
    corpus = load_blocks(DataArguments(**options))
    assert (
        corpus.validation.array[:].ravel().tolist()
        == naive_ids(UNICODE, tokenizer)[: corpus.validation.array.size]
    )
    few = load_blocks(DataArguments(**options, validation_blocks=3))
    assert np.array_equal(few.validation.array[:], corpus.validation.array[:3])
    text = tokenizer.decode(few.validation.array[:].ravel(), skip_special_tokens=True).rstrip("\ufffd")
    assert 0 <= few.validation.bytes - len(text.encode()) <= 4  # the last character may be split
    assert few.train.array.shape == corpus.train.array.shape


def test_hub_data_set_is_asked_for_by_name_and_config(monkeypatch):
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        rows = datasets.Dataset.from_dict({"text": [" = Title = \n", "", " Words . \n"] * 40})
        return {"train": rows, "validation": rows, "test": rows}

    monkeypatch.setattr("hf_slt.text.corpus._require_hub", lambda name: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    arguments = DataArguments(
        dataset="Salesforce/wikitext",
        dataset_config="wikitext-103-raw-v1",
        end_of_text=False,
        vocab_size=257,
        block_size=4,
    )
    corpus = load_blocks(arguments)
    assert asked == [(("Salesforce/wikitext", "wikitext-103-raw-v1"), {"streaming": False})]
    assert corpus.tokenizer.eos_token_id not in corpus.train.array[:]
    assert corpus.tokenizer.decode(corpus.train.array[:].ravel()[:40]).startswith(
        " = Title = \n Words . \n ="
    )


# ---------------------------------------------------------------------------- cache


@pytest.fixture
def arguments(tmp_path):
    path = write(tmp_path, "a.jsonl", ASCII)
    cache = str(tmp_path / "cache")
    return DataArguments(train_files=[path], vocab_size=300, block_size=16, cache_dir=cache)


def cache_files(arguments: DataArguments, pattern: str = "tokens-*.json") -> list[Path]:
    return sorted(Path(arguments.cache_dir).glob(pattern))


def test_cache_is_used_and_keyed_by_content(arguments, monkeypatch):
    first = load_blocks(arguments)
    assert len(cache_files(arguments)) == 2  # train, validation
    with monkeypatch.context() as patch:
        patch.setattr(Tokenise, "__call__", lambda *args: pytest.fail("tokenised again"))
        patch.setattr(tokenizers, "train_tokenizer", lambda *args: pytest.fail("trained again"))
        again = load_blocks(arguments)
    assert np.array_equal(first.train.array[:], again.train.array[:])
    assert (first.train.bytes, first.digest) == (again.train.bytes, again.digest)
    load_blocks(dataclasses.replace(arguments, block_size=8))  # blocks are views: nothing is tokenised again
    assert len(cache_files(arguments)) == 2
    for change in ({"end_of_text": False}, {"vocab_size": 310}, {"validation_fraction": 0.2}):
        before = len(cache_files(arguments))
        load_blocks(dataclasses.replace(arguments, **change))
        assert len(cache_files(arguments)) > before, change


def flip_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "flipped bit": flip_middle,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "emptied": lambda path: path.write_bytes(b""),
    "of another form": lambda path: path.write_text("[1]"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_cache_is_noticed_and_rebuilt(kind, arguments, caplog):
    whole = load_blocks(arguments)
    array = whole.train.array[:]
    for pattern in ("tokens-*.arrow", "tokens-*.json", "tokenizer-*.json"):
        for path in cache_files(arguments, pattern):
            DAMAGE[kind](path)
        again = load_blocks(arguments)
        assert "damaged" in caplog.text, pattern
        assert np.array_equal(array, again.train.array[:])
        assert whole.train.bytes == again.train.bytes
        caplog.clear()
        load_blocks(arguments)
        assert caplog.text == ""


def test_a_missing_file_of_the_cache_is_made_again(arguments, caplog):
    array = load_blocks(arguments).train.array[:]
    for path in cache_files(arguments, "tokens-*.arrow"):
        path.unlink()
    assert np.array_equal(array, load_blocks(arguments).train.array[:])
    assert "damaged" in caplog.text


def test_a_failed_write_leaves_nothing_that_is_read(arguments, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DataError, match=r"No space left on device; choose another cache_dir"):
            load_blocks(arguments)
    assert cache_files(arguments) == cache_files(arguments, "tokenizer-*.json") == []
    assert len(load_blocks(arguments).train)


# ---------------------------------------------------------------------------- streams and mixtures


@pytest.fixture
def shards(tmp_path) -> list[str]:
    return [write(tmp_path, f"shard-{part}.jsonl", ASCII[50 * part : 50 * part + 50]) for part in range(3)]


def test_a_stream_is_resumed_at_any_block(shards, tokenizer):
    texts = read_files(shards, streaming=True)
    blocks = StreamedBlocks(texts, Tokenise.by(tokenizer, True), 16)
    read = list(blocks.read())
    assert np.array_equal(
        np.stack([ids for ids, _ in read]).ravel(), naive_ids(ASCII, tokenizer)[: 16 * len(read)]
    )
    for number in (1, 5, len(read) // 2, len(read) - 1):
        place = json.loads(json.dumps(read[number - 1][1]))  # as a checkpoint holds it
        again = [ids for ids, _ in StreamedBlocks(texts, blocks.tokenise, 16).read(place)]
        assert np.array_equal(again, [ids for ids, _ in read[number:]])


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_a_stream(processes, shards, tokenizer):
    """Three shards for three processes; two processes take every other document."""
    tokenise = Tokenise.by(tokenizer, True)
    whole = StreamedBlocks(read_files(shards, streaming=True), tokenise, 1)
    found = []
    for rank in range(processes):
        share = whole.share(rank, processes)
        documents = ASCII[50 * rank : 50 * rank + 50] if processes == 3 else ASCII[rank::2]
        ids = [int(ids[0]) for ids, _ in share.read()]
        assert ids == naive_ids(documents, tokenizer)
        found += ids
    assert sorted(found) == sorted(naive_ids(ASCII, tokenizer))


@pytest.mark.parametrize("streaming", [False, True])
def test_sources_are_mixed_with_weights(streaming, tmp_path):
    many = write(tmp_path, "a.jsonl", [f"a {i}" for i in range(300)])
    few = write(tmp_path, "b.jsonl", [f"b {i}" for i in range(100)])
    options = {"vocab_size": 257, "block_size": 4, "validation_files": [few], "streaming": streaming}
    mixed = load_blocks(DataArguments(train_files=[many, few], mixing_weights=[3, 1], **options))
    words = mixed.tokenizer.decode(np.concatenate([block["input_ids"] for block in mixed.train])).split()
    first = words[:200]
    assert 0.15 < sum("b" in word for word in first) / sum(word[-1:] in "ab" for word in first) < 0.35
    plain = load_blocks(DataArguments(train_files=[many, few], **options))
    text = mixed.tokenizer.decode(np.concatenate([block["input_ids"] for block in plain.train]))
    assert text.startswith("a 0<|endoftext|>a 1")
    assert text.index("b 0") > text.index("a 299")


# ---------------------------------------------------------------------------- errors and arguments


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 1}, "block_size 1 leaves nothing"),
        ({"vocab_size": 256}, "vocab_size 256 cannot hold"),
        ({"validation_fraction": 1.0}, r"validation_fraction 1\.0 is not between"),
        ({"validation_blocks": 0}, "validation_blocks 0 validates on nothing"),
        ({"train_blocks": 0}, "train_blocks 0 trains on nothing"),
        ({"train_blocks": 5, "streaming": True}, "limit max_steps instead"),
        ({"sample_by": "word"}, "sample_by 'word' is unknown"),
        ({"dataset": "x", "train_files": ["y"]}, "both given; leave one"),
        ({"validation_files": ["y"]}, "without train_files"),
        ({"dataset": ["x", "y"], "dataset_config": "z"}, "dataset_config has 1 entries for 2 data sets"),
        ({"train_files": ["x"], "mixing_weights": [1, 2]}, r"mixing_weights \[1, 2\] for 1 data sets"),
        ({"preprocessing_num_workers": 0}, "preprocessing_num_workers 0 tokenise nothing"),
    ],
)
def test_wrong_arguments(change, message):
    with pytest.raises(DataError, match=message):
        DataArguments(**change)


@pytest.mark.parametrize("streaming", [False, True])
def test_wrong_sources(streaming, tmp_path):
    good = write(tmp_path, "a.jsonl", ASCII)
    empty = write(tmp_path, "empty.txt", [])
    short = write(tmp_path, "short.txt", ["a few words\n" * 3])
    latin = tmp_path / "latin.txt"
    latin.write_bytes("é".encode("latin-1") * 1000)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a"}\n{"text": ')
    (tmp_path / "a.docx").write_text("x")

    def load(*files, **options):
        corpus = load_blocks(DataArguments(train_files=list(files), streaming=streaming, **options))
        return list(corpus.train)

    for files, options, message in [
        ([str(tmp_path / "nope.txt")], {}, "there is no file '.*nope.txt'"),
        ([str(tmp_path / "*.csv")], {}, r"no file matches the pattern '.*\*.csv'"),
        ([str(tmp_path / "a.docx")], {}, r"suffix '.docx' is unknown; use one of .txt, .md, .jsonl"),
        ([good, short], {}, r"several kinds \(json, text\)"),
        ([good], {"text_column": "body"}, "no column 'body'; set text_column to one of: text, id"),
        ([good], {"text_column": "id"}, "column 'id' holds int"),
        ([empty], {}, "train split holds no text"),
        ([short], {"validation_files": [empty]}, "validation split holds no text"),
        (
            [good],
            {"validation_files": [short], "vocab_size": 257},
            r"validation split has \d+ tokens, too few",
        ),
        (
            [short],
            {"validation_files": [good]},
            r"train split has \d+ tokens, too few for one block of 128; give",
        ),
        ([str(latin)], {}, "cannot read .*latin.txt: .*UnicodeDecodeError.*UTF-8"),
        ([str(broken)], {}, "cannot read .*broken.jsonl"),
        ([good], {"tokenizer": str(tmp_path / "nowhere")}, "cannot load tokenizer '.*nowhere'"),
    ]:
        with pytest.raises(DataError, match=message):
            load(*files, **options)


def test_errors_of_data_sets(tmp_path, monkeypatch):
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder, "train.jsonl", ASCII)
    with pytest.raises(DataError, match="no split 'dev'; set train_split to one of: train"):
        load_blocks(DataArguments(dataset=str(folder), train_split="dev"))
    with pytest.raises(DataError, match="a stream of lines has no known end"):
        load_blocks(DataArguments(dataset=str(folder), streaming=True, end_of_text=False))

    def unreachable(*args, **options):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr("hf_slt.text.corpus._require_hub", lambda name: None)
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    message = "cannot load data set some/name main: ConnectionError: .*train_files, or .*embedded corpus"
    with pytest.raises(DataError, match=message):
        load_blocks(DataArguments(dataset="some/name", dataset_config="main"))


def broken_import(name, *rest):
    raise ImportError("pyarrow requires NumPy 2.0 or newer, found 1.26.0")


def broken_name(*args, **options):
    return datasets.config.NAME_OF_ANOTHER_VERSION


def broken_within(*args, **options):
    try:
        broken_name()
    except AttributeError as error:
        raise RuntimeError("An error occurred while generating the dataset") from error


@pytest.mark.parametrize("way", ["import", "name", "within"])
def test_a_library_that_does_not_work_is_not_blamed_on_the_text(tmp_path, monkeypatch, way):
    if way == "import":  # as with NumPy 1.26 beside a new pyarrow
        monkeypatch.delitem(sys.modules, "datasets")
        finder = types.SimpleNamespace(
            find_spec=lambda name, *rest: name == "datasets" and broken_import(name)
        )
        monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    else:
        broken = {"name": broken_name, "within": broken_within}[way]
        monkeypatch.setattr("hf_slt.text.corpus._require_hub", lambda name: None)
        monkeypatch.setattr(datasets, "load_dataset", broken)
    path = write(tmp_path, "a.txt", ASCII)
    for options in ({"train_files": [path]}, {"dataset": "some/name"}):
        with pytest.raises(DataError, match="pip install --upgrade numpy pyarrow") as refused:
            load_blocks(DataArguments(**options))
        assert "NumPy 2.0" in str(refused.value) or "NAME_OF_ANOTHER_VERSION" in str(refused.value)
        assert not re.search("UTF-8|check name", str(refused.value))
        assert len(str(refused.value).splitlines()) == 1


def test_an_attribute_that_an_object_lacks_may_be_the_fault_of_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_slt.text.corpus._require_hub", lambda name: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: "a row".keys())
    with pytest.raises(DataError, match=r"AttributeError: .*; check that the files are whole"):
        read_files([write(tmp_path, "a.txt", ASCII)])


def test_a_tokenizer_without_end_of_text_is_refused(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tok")
    path = tmp_path / "tok" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["eos_token"]
    path.write_text(json.dumps(config))
    with pytest.raises(DataError, match="no end-of-text token; set its eos_token"):
        load_tokenizer(str(tmp_path / "tok"))
