"""Loss, perplexity, bits per byte: against loops over single tokens, and against numbers made by hand."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_slt.text.blocks import TokenBlocks, pack_beginning
from hf_slt.text.evaluation import (
    EvaluationError,
    _windows,
    evaluate_blocks,
    evaluate_saved,
    evaluate_text,
    evaluating,
)
from hf_slt.text.tokenizer import train_tokenizer

ROOT = Path(__file__).parents[2]
TEXTS = ["A mask is learned, the weights never are. " * 6, "é🙂", "one seed;\nmany tickets\n" * 9, "a"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=300, model_max_length=16)


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    end = tokenizer.eos_token_id
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    config = GPT2Config(vocab_size=len(tokenizer), **sizes, bos_token_id=end, eos_token_id=end)
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():  # far from uniform, so that mistakes show
            parameter.mul_(4)
    return model.train()


@pytest.fixture(scope="module")
def saved(model, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def nats(model, context: list[int], target: int) -> float:
    """-ln p(target | context), one token at a time."""
    with evaluating(model):
        logits = model(input_ids=torch.tensor([context])).logits[0, -1]
    return -torch.log_softmax(logits.double(), -1)[target].item()


class Uniform(torch.nn.Module):
    """A model of buffers only, like a ticket without LayerNorm, that finds all tokens equally likely."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.register_buffer("zeros", torch.zeros(vocabulary))

    def forward(self, input_ids, attention_mask=None):
        return SimpleNamespace(logits=self.zeros.expand(*input_ids.shape, -1))


# ---------------------------------------------------------------------------- blocks


def make_blocks(count: int = 7, length: int = 12, vocabulary: int = 300) -> torch.Tensor:
    return torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(1))


def test_blocks_against_single_tokens(model):
    blocks = make_blocks()
    losses = [nats(model, row[:i], row[i]) for row in blocks.tolist() for i in range(1, len(row))]
    expected = sum(losses) / len(losses)
    # 7 blocks in batches of 3, 3, 1: a mean of batch means would be wrong.
    measures = evaluate_blocks(model, blocks.split(3))
    assert measures["loss"] == pytest.approx(expected, rel=1e-6)
    assert measures["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    assert measures["tokens"] == len(losses) == 7 * 11
    with evaluating(model):
        assert measures["loss"] == pytest.approx(model(blocks, labels=blocks).loss.item(), rel=1e-5)


def test_blocks_of_every_kind(model):
    blocks = make_blocks()
    expected = evaluate_blocks(model, [blocks])
    packed = TokenBlocks(blocks.numpy().astype(np.uint16), bytes=1000)
    for batches in (
        blocks.split(2),
        [{"input_ids": blocks}],
        [blocks.numpy()],
        [packed[:]],
        DataLoader(packed, batch_size=4),
    ):
        measures = evaluate_blocks(model, batches)
        assert measures == pytest.approx(expected, rel=1e-6)


def test_labels_of_minus_100_are_left_out(model):
    blocks = make_blocks()
    labels = blocks.clone()
    labels[2:] = -100  # rows that only fill a batch
    labels[0, 5:9] = -100
    measures = evaluate_blocks(model, [{"input_ids": blocks, "labels": labels}])
    rows = [(0, i) for i in range(1, 12) if not 5 <= i < 9] + [(1, i) for i in range(1, 12)]
    expected = sum(nats(model, blocks[r, :i].tolist(), blocks[r, i].item()) for r, i in rows) / len(rows)
    assert measures["loss"] == pytest.approx(expected, rel=1e-6)
    assert measures["tokens"] == len(rows)


def test_reduce_joins_processes(model):
    blocks = make_blocks()
    sums = []

    def other_process(tensor):
        sums.append(tensor)
        return tensor

    evaluate_blocks(model, [blocks[4:]], reduce=other_process)
    joined = evaluate_blocks(model, [blocks[:4]], reduce=lambda tensor: tensor + sums[0])
    assert joined == pytest.approx(evaluate_blocks(model, [blocks]), rel=1e-7)


def test_bits_per_byte_of_blocks_by_hand(tokenizer):
    text = "abcd" * 32  # 128 bytes
    blocks = pack_beginning(datasets.Dataset.from_dict({"text": [text]}), tokenizer, 8, 99, end_of_text=False)
    measures = evaluate_blocks(Uniform(256), [blocks[:]], blocks.bytes_per_token)
    assert measures["loss"] == pytest.approx(math.log(256))
    assert measures["perplexity"] == pytest.approx(256)
    assert measures["bits_per_byte"] == pytest.approx(8 * blocks.array.size / blocks.bytes)


def test_mode_and_gradients_are_restored(model):
    model.train()
    frozen = model.transformer.h[0].eval()  # a part the caller keeps in eval mode
    modes = [module.training for module in model.modules()]
    before = torch.is_grad_enabled()
    first = evaluate_blocks(model, [make_blocks()])
    assert first == evaluate_blocks(model, [make_blocks()])  # dropout would differ
    with evaluating(model):
        assert not model.training
        assert not torch.is_grad_enabled()
    with pytest.raises(IndexError):
        evaluate_blocks(model, [torch.tensor([[0, 10**6]])])
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled() == before
    assert all(parameter.grad is None for parameter in model.parameters())
    frozen.train()


def test_overflow_and_nothing_to_predict(model):
    assert evaluate_blocks(Uniform(4), [torch.tensor([[0, 1]])])["perplexity"] == pytest.approx(4)
    steep = Uniform(2)
    steep.zeros += torch.tensor([1000.0, 0.0])
    assert evaluate_blocks(steep, [torch.tensor([[0, 1]])])["perplexity"] == math.inf
    steep.zeros += math.nan
    assert math.isnan(evaluate_blocks(steep, [torch.tensor([[0, 1]])])["perplexity"])
    for batches in ([], [torch.zeros(3, 1, dtype=torch.long)]):
        with pytest.raises(EvaluationError, match="no token to predict"):
            evaluate_blocks(model, batches)


# ---------------------------------------------------------------------------- text


@pytest.mark.parametrize(("block_size", "stride"), [(1, 1), (5, 5), (5, 2), (8, 1), (16, 7), (50, 25)])
def test_windows_take_each_target_once_with_enough_context(block_size, stride):
    for length in range(1, 60):
        targets = []
        for start, fresh, end in _windows(length, block_size, stride):
            assert end - 1 - start <= block_size
            for target in range(fresh, end):
                targets.append(target)
                assert target - start >= min(target, block_size - stride + 1)
        assert targets == list(range(1, length))


@pytest.mark.parametrize(("block_size", "stride"), [(16, 16), (16, 8), (7, 3), (1, 1)])
def test_text_against_single_tokens(block_size, stride, model, tokenizer):
    total, count = 0.0, 0
    for text in TEXTS:
        ids = [tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]
        for i in range(1, len(ids)):
            # The window that first holds token i as a target ends at the first of the places
            # block_size, block_size + stride, ... that is at least i, or at the last token.
            end = block_size + stride * max(0, math.ceil((i - block_size) / stride))
            end = min(end, len(ids) - 1)
            total += nats(model, ids[max(0, end - block_size) : i], ids[i])
            count += 1
    measures = evaluate_text(model, tokenizer, TEXTS, block_size, stride, batch_size=3)
    size = sum(len(text.encode()) for text in TEXTS)
    assert measures["tokens"] == count
    assert measures["bytes"] == size
    assert measures["loss"] == pytest.approx(total / count, rel=1e-6)
    assert measures["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-6)
    assert measures["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)


def test_neither_order_nor_batch_nor_empty_texts_matter(model, tokenizer):
    expected = evaluate_text(model, tokenizer, TEXTS)
    assert evaluate_text(model, tokenizer, ["", *TEXTS[::-1], ""]) == pytest.approx(expected, rel=1e-6)
    for batch_size in (1, 2, 100):
        again = evaluate_text(model, tokenizer, iter(TEXTS), batch_size=batch_size)
        assert again == pytest.approx(expected, rel=1e-6)
    assert evaluate_text(model, tokenizer, TEXTS[0]) == evaluate_text(model, tokenizer, TEXTS[:1])
    assert model.training


def test_bits_per_byte_by_hand(tokenizer):
    text = "mask é🙂"  # 4 + 1 + 2 + 4 bytes
    measures = evaluate_text(Uniform(512), tokenizer, text)
    tokens = len(tokenizer(text)["input_ids"])
    assert measures["bytes"] == 11
    assert measures["bits_per_byte"] == pytest.approx(9 * tokens / 11)


def test_another_family(tokenizer):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes))
    ids = [tokenizer.eos_token_id, *tokenizer(TEXTS[1])["input_ids"]]
    expected = sum(nats(model, ids[:i], ids[i]) for i in range(1, len(ids))) / (len(ids) - 1)
    # Padded beside a longer one: what follows a text must not change its loss.
    both = evaluate_text(model, tokenizer, [TEXTS[1], TEXTS[0]], batch_size=2)
    alone = [evaluate_text(model, tokenizer, text) for text in (TEXTS[1], TEXTS[0])]
    assert alone[0]["loss"] == pytest.approx(expected, rel=1e-6)
    assert both["loss"] * both["tokens"] == pytest.approx(
        sum(m["loss"] * m["tokens"] for m in alone), rel=1e-6
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 17}, r"block_size 17 is not in 1\.\.16"),
        ({"block_size": 0}, "block_size 0 is not in"),
        ({"block_size": 8, "stride": 9}, r"stride 9 is not in 1\.\.8"),
        ({"stride": 0}, "stride 0 is not in"),
        ({"batch_size": 0}, "batch_size 0 is not positive"),
        ({"texts": ["", ""]}, "hold no token to predict"),
        ({"texts": []}, "hold no token to predict"),
    ],
)
def test_wrong_options(options, message, model, tokenizer):
    with pytest.raises(EvaluationError, match=message):
        evaluate_text(model, tokenizer, **{"texts": TEXTS, **options})


def test_a_tokenizer_of_another_model_is_refused(model):
    corpus = ["".join(chr(i) for i in range(97, 123)) * 3, " many more words for many more merges" * 9]
    other = train_tokenizer(corpus, 400, 16)
    assert len(other) > model.config.vocab_size
    with pytest.raises(EvaluationError, match=r"outside the model's vocabulary of 300; use the model's tok"):
        evaluate_text(model, other, corpus)
    other.bos_token = other.eos_token = None
    with pytest.raises(EvaluationError, match=r"set tokenizer\.eos_token"):
        evaluate_text(model, other, corpus)


# ---------------------------------------------------------------------------- metric and saved models


def test_metric_of_the_evaluate_library(model, tokenizer, saved, tmp_path):
    import evaluate

    metric = evaluate.load(str(ROOT / "hf_slt" / "text" / "causal_lm_metric.py"), cache_dir=str(tmp_path))
    expected = evaluate_text(model, tokenizer, TEXTS)
    assert metric.compute(predictions=TEXTS, model=model, tokenizer=tokenizer) == expected
    options = {"block_size": 8, "stride": 4, "batch_size": 2}
    by_name = metric.compute(predictions=TEXTS, model=str(saved), **options)
    assert by_name == pytest.approx(evaluate_text(model, tokenizer, TEXTS, **options), rel=1e-6)
    for text in TEXTS:
        metric.add(prediction=text)
    assert metric.compute(model=model, tokenizer=tokenizer) == expected
    with pytest.raises(ValueError, match="needs its tokenizer as an object"):
        metric.compute(predictions=TEXTS, model=model)
    # It runs on its copy of evaluation.py, so it serves where this package is not installed.
    assert sys.modules[type(metric).__module__].evaluate_text.__module__.startswith("evaluate_modules")


def test_saved_models(model, tokenizer, saved, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXTS[0])
    expected = evaluate_text(model, tokenizer, TEXTS[0], 8, 4)
    found = evaluate_saved(str(saved), [str(file)], block_size=8, stride=4)
    assert found == pytest.approx(expected, rel=1e-6)
    for options in ({"name": str(tmp_path)}, {"tokenizer": str(tmp_path)}):
        with pytest.raises(EvaluationError, match=r"cannot load .*; give a folder or Hub name"):
            evaluate_saved(**{"name": str(saved), "files": [str(file)], **options})


def test_a_loss_that_is_no_number_is_an_error(model, tokenizer, tmp_path):
    broken = GPT2LMHeadModel(model.config)
    with torch.no_grad():
        broken.transformer.wte.weight[:] = math.nan
    broken.save_pretrained(tmp_path / "broken")
    tokenizer.save_pretrained(tmp_path / "broken")
    (tmp_path / "text.txt").write_text(TEXTS[0])
    with pytest.raises(EvaluationError, match="loss is nan: the weights are damaged or overflow auto"):
        evaluate_saved(str(tmp_path / "broken"), [str(tmp_path / "text.txt")])
