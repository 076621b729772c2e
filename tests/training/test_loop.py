"""Training: functions of the step by hand, whole runs of tiny models, real launches, kills and signals."""

import dataclasses
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import TensorBoardTracker
from cases import tiny_batch, tiny_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel, TrainingArguments

from hf_slt import SupermaskGPT2LMHeadModel, verify_ticket
from hf_slt.errors import SLTError
from hf_slt.masks import rules
from hf_slt.masks.relaxation import Relaxed
from hf_slt.sharing.card import kept_of
from hf_slt.text.blocks import TokenBlocks, load_blocks, train_tokenizer
from hf_slt.text.evaluation import evaluate_blocks
from hf_slt.training import checkpoints
from hf_slt.training import run as training
from hf_slt.training.arguments import (
    CONTROLS,
    FREE_TO_CHANGE,
    Arguments,
    RunArguments,
    parse_arguments,
    steps_of,
)
from hf_slt.training.batches import Batches, block_order, validation_batches
from hf_slt.training.checkpoints import CheckpointError
from hf_slt.training.monitoring import Interruption, attention_moments, mask_measures, read_log
from hf_slt.training.report import train_and_compare
from hf_slt.training.run import Run, build_model, build_optimizer, ramp_at, rate_at
from hf_slt.weights.random_weights import TensorSpec

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "recipes" / "train_gpt2_slt.py"
TEMPLATE = ROOT / "model_cards" / "template.md"
sys.path.insert(0, str(SCRIPT.parent))
from train_gpt2_slt import find_ticket, optimizer_step, train  # noqa: E402


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A small language: sentences of 20 words, enough to learn in 20 steps."""
    folder, dice = tmp_path_factory.mktemp("text"), random.Random(0)
    words = "the cat dog sat on mat and ran to a big red house where it saw one small blue bird".split()
    for name, lines in (("train", 900), ("valid", 90)):
        sentences = (" ".join(dice.choice(words) for _ in range(12)) + "." for _ in range(lines))
        (folder / f"{name}.txt").write_text("\n".join(sentences))
    return folder


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Accelerate remembers the first configuration of a process; tests have several."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def base(text):
    return [
        *("--train_files", str(text / "train.txt"), "--validation_files", str(text / "valid.txt")),
        *("--vocab_size", "300", "--block_size", "32", "--cache_dir", str(text / "cache")),
        *("--n_layer", "2", "--n_embd", "32", "--n_head", "2", "--scale_with_width", "true"),
        *(
            "--max_steps",
            "12",
            "--per_device_train_batch_size",
            "4",
            "--gradient_accumulation_steps",
            "2",
            "--logging_steps",
            "1",
        ),
        *("--eval_steps", "6", "--save_steps", "4", "--dropout", "0.1"),
    ]


@pytest.fixture
def arguments(base, tmp_path):
    def make(*words: str) -> Arguments:
        return parse_arguments([*base, "--output_dir", str(tmp_path / "run"), *words])

    return make


@pytest.fixture(scope="module")
def uninterrupted(base, tmp_path_factory):
    """The run that others are compared with."""
    folder = tmp_path_factory.mktemp("whole")
    report = find_ticket(parse_arguments([*base, "--output_dir", str(folder)]))
    return folder, report


def mask_bytes(folder: Path) -> bytes:
    return (folder / "ticket" / "mask.safetensors").read_bytes()


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_log(folder / "log.jsonl") if record["kind"] == "train"]


# -- arguments --------------------------------------------------------------------------------------


def test_defaults_then_preset_then_command_line(tmp_path):
    (tmp_path / "p.yaml").write_text(
        "max_steps: 7\nlearning_rate: 1e-4\nlayer_norm: false\ncompare: [dense, random_mask]\n"
    )
    for words, preset in ((["--config", str(tmp_path / "p.yaml")], None), ([], tmp_path / "p.yaml")):
        found = parse_arguments([*words, "--max_steps", "9"], preset=preset)
        assert (found.run.max_steps, found.run.learning_rate, found.run.num_train_epochs) == (9, 1e-4, 3)
        assert (found.model.layer_norm, found.model.n_layer) == (False, 12)  # the preset's, the config's
        assert found.run.compare == ["dense", "random_mask"]


def test_another_rule_than_that_of_a_preset(tmp_path):
    """What the preset says of its own rule does not apply; what the command line says does."""
    (tmp_path / "p.yaml").write_text("density: 0.5\n")
    preset = ["--config", str(tmp_path / "p.yaml")]
    assert parse_arguments([*preset, "--rule", "global"]).model.density == 0.5
    found = parse_arguments([*preset, "--rule", "multicoat", "--densities", "0.3", "0.1"]).model
    assert (found.density, found.densities) == (None, [0.3, 0.1])
    with pytest.raises(SystemExit):
        parse_arguments([*preset, "--rule", "sign", "--density", "0.5"])
    (tmp_path / "p.yaml").write_text("rule: multicoat\ndensities: [0.3, 0.1]\n")
    assert parse_arguments(preset).model.densities == [0.3, 0.1]
    assert parse_arguments([*preset, "--rule", "edge_popup"]).model.density == 0.3


def test_values_and_spellings():
    found = parse_arguments("--overwrite --layer-norm false --max-steps=5 --qk_scale 2 --bf16 False".split())
    assert (found.run.overwrite, found.run.max_steps, found.run.bf16) == (True, 5, False)
    assert (found.model.layer_norm, found.model.qk_scale) == (False, 2.0)
    for words, expected in (([], True), (["true"], True), (["trained"], "trained")):
        assert parse_arguments(["--layer_norm", *words]).model.layer_norm == expected
    found = parse_arguments("--rule multicoat --densities 0.3 0.125".split())
    assert found.model.densities == [0.3, 0.125]
    assert parse_arguments("--rule n_m --n_of_m 1 4".split()).model.n_of_m == [1, 4]
    for words, expected in (([], None), ([""], "true"), (["true"], "true"), (["false"], None), (["a"], "a")):
        words = [word for one in words for word in ("--resume_from_checkpoint", one) if word]
        assert parse_arguments(words).run.resume_from_checkpoint == expected


@pytest.mark.parametrize(
    ("preset", "words", "message"),
    [
        ("learning_rat: 1", [], "unknown option learning_rat; did you mean learning_rate?"),
        ("max_steps: many", [], "invalid int value: 'many'"),
        ("max_steps: 1.5", [], "invalid int value: '1.5'"),
        ("- a list", [], "is not a list of 'name: value' lines"),
        ("a: [", [], "is not YAML"),
        ("", ["--stepz", "3"], "unknown option --stepz; did you mean --max_steps?"),
        ("", ["--batch_size", "3"], "did you mean --per_device_train_batch_size?"),
        ("", ["--max_step", "3"], "unknown option --max_step;"),  # no abbreviations either
        ("", ["--overwrite", "perhaps"], "'perhaps' is neither true nor false"),
        ("", ["--layer_norm", "perhaps"], "layer_norm 'perhaps' is not one of True, False, 'trained'"),
        ("", ["--rule", "multicoat", "--densities", "a"], "'a'"),
        ("", ["--rule", "sign", "--ramp_start", "1", "--ramp_steps", "5"], "rule 'sign' has no density or"),
        ("", ["--rule", "sign", "--density", "0.3"], "density 0.3 is no option of rule 'sign'"),
        ("", ["--ramp_start", "2", "--ramp_steps", "5"], "ramp_start 2.0 over ramp_steps 5"),
        ("", ["--weight_restart", "0.01"], "weight_restart 0.01 is for the steps that follow relaxed steps"),
        ("", ["--relaxed_steps", "1.5"], "relaxed_steps 1.5 is neither a number of steps nor a share"),
        ("", ["--mask_steps", "0"], "mask_steps 0 is below 1"),
        ("", ["--control", "dens"], "control 'dens' is not one of dense, random_mask, frozen_embeddings"),
        ("", ["--max_steps", "0"], "max_steps 0 is not positive; -1 counts by num_train_epochs"),
        ("", ["--eval_steps", "2.5"], "eval_steps 2.5 is neither a number of steps nor a share"),
        ("", ["--block_size", "1"], "block_size 1"),
        ("", ["--law", "norml"], "law 'norml' is not one of"),  # before any text is read
        ("", ["--qk_scale", "big"], "qk_scale 'big' is neither 'paper' nor a"),
        ("", ["--activation_function", "gelu_newer"], "'gelu_newer' is unknown; did you mean gelu_new?"),
        ("", ["--n_embd", "130", "--n_head", "4"], "n_embd 130 is not a multiple of n_head 4"),
        ("", ["--dropout", "1.5"], "dropout 1.5 is not in [0, 1)"),
        ("", ["--learning_rate", "-1"], "learning_rate -1.0 is negative"),
        ("", ["--min_lr_rate", "2"], "min_lr_rate 2.0 is not in [0, 1]"),
        ("", ["--report_to", "clearml"], "report_to clearml: not installed; pip install clearml"),
        ("", ["--report_to", "wandbb"], "report_to 'wandbb' is not one of none, "),
        ("", ["--device", "cuda"], "unknown option --device; training uses a GPU if there is one, otherwise"),
        ("", ["text.txt"], "'text.txt' is one word too many"),
    ],
)
def test_what_is_unknown_or_ill_typed_is_an_error_of_one_line(tmp_path, capsys, preset, words, message):
    (tmp_path / "p.yaml").write_text(preset or "max_steps: 5")
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--config", str(tmp_path / "p.yaml"), *words])
    shown = capsys.readouterr().err
    assert (caught.value.code, shown.count("\n")) == (2, 1)
    assert message in shown


def test_help_shows_every_option_and_what_the_preset_makes_of_it(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        parse_arguments(["--help", "--config", str(ROOT / "recipes" / "nano.yaml")])
    shown = {part.split()[0]: part.split() for part in capsys.readouterr().out.split("\n  --")[1:]}
    assert all(len(shown[name]) > 4 for name in Arguments().flat())  # none without help
    assert shown["max_steps"][-2:] == ["(default:", "500)"]
    assert shown["n_layer"][-2:] == ["(default:", "4)"]


def test_a_preset_that_was_not_named_is_named_once(base, tmp_path, capsys, monkeypatch):
    preset = SCRIPT.with_name("nano.yaml")
    words = [*base, "--output_dir", str(tmp_path / "run"), "--max_steps", "1", "--compare", "random_mask"]
    training.print_once.cache_clear()
    train_and_compare(parse_arguments(words, preset=preset), find_ticket, TEMPLATE)
    first, *others = capsys.readouterr().out.splitlines()
    assert first == f"no --config was given: the preset {preset} applies"
    assert not [line for line in others if "--config" in line]
    training.print_once.cache_clear()
    words += ["--overwrite", "--config", str(preset)]
    train_and_compare(parse_arguments(words, preset=preset), find_ticket, TEMPLATE)
    assert "no --config" not in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        parse_arguments(["--help"], preset=preset)
    assert "Without --config, nano.yaml applies" in capsys.readouterr().out


@pytest.mark.parametrize("preset", sorted(ROOT.glob("recipes/*.yaml")), ids=lambda path: path.stem)
def test_presets(preset):
    found = parse_arguments(["--config", str(preset)])
    if preset.stem in ("mini", "small", "medium"):  # the paper's settings
        run = found.run
        sequences = run.per_device_train_batch_size * run.gradient_accumulation_steps * 4
        assert (sequences, found.data.block_size, found.model.density) == (512, 1024, 0.3)
        assert (run.learning_rate, run.learning_rate * run.min_lr_rate) == (1e-4, 1e-5)
        assert run.num_train_epochs == 50
        assert all(steps_of(run.warmup_steps, 50 * epoch) == epoch for epoch in range(1, 500))


def test_steps_may_be_a_share_as_in_transformers(tmp_path, arguments):
    for value, steps in ((0.1, 25), (0.04, 25), (7, 25), (0, 25), (0.999, 3)):
        theirs = TrainingArguments(str(tmp_path), warmup_steps=value).get_warmup_steps(steps)
        assert steps_of(value, steps) == theirs
    run = Run(arguments("--eval_steps", "0.25"))
    due = []
    for step in range(1, run.steps + 1):
        run.done = step
        due += [step] if run.due("eval_steps") else []
    assert due == [3, 6, 9, 12]


def test_passes_make_steps(arguments):
    run = Run(arguments("--max_steps", "-1", "--num_train_epochs", "1.5"))
    assert run.steps == math.ceil(1.5 * (len(run.corpus.train) // 8)) > 12
    with pytest.raises(
        SLTError, match="a stream has no known length, so passes cannot be counted; give max_steps"
    ):
        Run(arguments("--max_steps", "-1", "--streaming"))


def test_what_may_change_on_resuming_is_an_option():
    assert set(Arguments().flat()) >= FREE_TO_CHANGE


# -- functions of the step ----------------------------------------------------------------------------


def test_rates():
    rates = [rate_at(step, 100, 10, 0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1
    assert rates[55] == pytest.approx(0.55)  # halfway down
    assert min(rates[10:]) == rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_density_ramp_reaches_the_model(arguments):
    run = Run(arguments("--ramp_start", "0.9", "--ramp_steps", "4", "--density", "0.3"))
    seen = []
    for _ in range(5):
        optimizer_step(run)
        seen.append(run.model.transformer.h[0].mlp.c_fc.parameter_plans["weight"].rule.density)
    assert seen == pytest.approx([ramp_at(step, 0.3, 0.9, 4) for step in range(5)])
    assert seen[0] == 0.9
    assert seen[-1] == 0.3


def test_every_pass_is_a_permutation_drawn_from_the_seed():
    first, second = block_order(3, 0, 50), block_order(3, 1, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first, block_order(3, 0, 50))
    assert not np.array_equal(first, block_order(4, 0, 50))


class FakeProcesses:
    device = torch.device("cpu")

    def __init__(self, rank, processes):
        self.process_index, self.num_processes = rank, processes


def test_processes_share_the_batches_of_one():
    blocks = TokenBlocks(np.arange(70).reshape(35, 2).astype(np.uint16), 70)
    one = Batches(blocks, 0, 8, 1, FakeProcesses(0, 1))
    halves = [Batches(blocks, 0, 2, 2, FakeProcesses(rank, 2)) for rank in range(2)]
    seen = []
    for step in range(10):  # beyond the end of a pass
        (whole,) = one.of_step(step)
        parts = [list(half.of_step(step)) for half in halves]
        mixed = torch.cat([parts[rank][micro]["input_ids"] for micro in range(2) for rank in range(2)])
        assert torch.equal(whole["input_ids"], mixed)
        seen += whole["input_ids"][:, 0].tolist()
    assert sorted(seen[:35]) == list(range(0, 70, 2))  # each block once a pass


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_validation_counts_every_block_once(processes):
    blocks = TokenBlocks(np.arange(14).reshape(7, 2).astype(np.uint16), 14)
    shares = [
        list(validation_batches(blocks, 2, FakeProcesses(rank, processes))) for rank in range(processes)
    ]
    assert len({len(share) for share in shares}) == 1  # or a collective call would wait for ever
    labels = np.concatenate([batch["labels"] for share in shares for batch in share]).ravel()
    assert sorted(labels[labels >= 0]) == list(range(14))


def test_a_block_may_name_tokens_that_are_not_learned():
    class SecondHalf(TokenBlocks):
        def __getitem__(self, index):
            ids = super().__getitem__(index)["input_ids"]
            return {"input_ids": ids, "labels": np.where(np.arange(4) < 2, -100, ids)}

    blocks = SecondHalf(np.arange(20).reshape(5, 4).astype(np.uint16), 20)
    (batch,) = Batches(blocks, 0, 3, 1, FakeProcesses(0, 1)).of_step(0)
    assert (batch["labels"][:, :2] == -100).all()
    assert torch.equal(batch["labels"][:, 2:], batch["input_ids"][:, 2:])
    labels = np.concatenate([b["labels"] for b in validation_batches(blocks, 2, FakeProcesses(0, 1))]).ravel()
    assert sorted(labels[labels >= 0]) == [4 * row + column for row in range(5) for column in (2, 3)]


@pytest.mark.parametrize("workers", ["0", "1"])
def test_streaming_reads_the_same_text(arguments, workers):
    words = ("--streaming", "--max_steps", "3", "--dataloader_num_workers", workers)
    run = Run(arguments(*words))
    stored = load_blocks(arguments().data).train
    rows = torch.cat([batch["input_ids"] for step in range(3) for batch in run.batches.of_step(step)])
    np.testing.assert_array_equal(rows.numpy(), stored[:24]["input_ids"])
    again = Run(arguments(*words))  # as when a checkpoint without a place is resumed after step 2
    resumed = torch.cat([batch["input_ids"] for batch in again.batches.of_step(2)])
    assert torch.equal(resumed, rows[16:24])


def test_a_streamed_run_resumes_to_the_same_bits(arguments, tmp_path, monkeypatch):
    words = ("--streaming", "--dataloader_num_workers", "0")  # 12 steps are about 1.3 passes over the text
    whole = find_ticket(arguments(*words, "--output_dir", str(tmp_path / "whole")))
    cut = arguments(*words, "--output_dir", str(tmp_path / "cut"))
    monkeypatch.setattr("hf_slt.training.monitoring.Interruption.agreed", lambda self, *_: True)
    assert find_ticket(cut) is None  # after one step
    monkeypatch.undo()
    again = dataclasses.replace(cut.run, resume_from_checkpoint="true")
    resumed = find_ticket(dataclasses.replace(cut, run=again))
    assert mask_bytes(tmp_path / "cut") == mask_bytes(tmp_path / "whole")
    assert resumed["loss"] == whole["loss"]


# -- optimizer ----------------------------------------------------------------------------------------


def test_scores_and_trained_weights_have_rates_of_their_own(arguments):
    words = "--embedding trained --weight_decay 0.1 --score_decay 0.3 --learning_rate 0.02"
    found = arguments(*words.split())
    model = build_model(found, load_blocks(found.data).tokenizer)
    groups = build_optimizer(model, found.run).param_groups
    settings = {id(one): (group["lr"], group["weight_decay"]) for group in groups for one in group["params"]}
    kinds = set()
    for name, parameter in model.named_parameters():
        kinds.add(name.endswith("scores"))
        assert settings[id(parameter)] == ((0.02, 0.3) if name.endswith("scores") else (1e-3, 0.1)), name
    assert kinds == {True, False}


def test_another_optimizer_may_be_given(arguments):
    """A recipe's own groups keep their ratio of rates through warm-up and cosine."""

    def two_rates(model, options):
        half = [
            {"params": [one], "lr": options.learning_rate / (1 + i)}
            for i, one in enumerate(model.parameters())
        ]
        return torch.optim.RMSprop(half)

    run = Run(arguments("--warmup_steps", "2"), make_optimizer=two_rates)
    for step in range(3):
        optimizer_step(run)
        rates = [group["lr"] for group in run.optimizer.param_groups]
        share = rate_at(step, 12, 2, 0.1)
        assert rates == pytest.approx([1e-2 * share / (1 + i) for i in range(len(rates))])
    assert isinstance(run.optimizer.optimizer, torch.optim.RMSprop)


def test_sgd_steps_are_sgd(arguments):
    run = Run(
        arguments(
            "--optim",
            "sgd",
            "--momentum",
            "0",
            "--learning_rate",
            "0.5",
            "--max_grad_norm",
            "0",
            "--dropout",
            "0",
        )
    )
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    twin = build_model(run.arguments, run.corpus.tokenizer)
    for batch in run.batches.of_step(0):
        (twin(**batch).loss / 2).backward()
    optimizer_step(run)
    for (name, after), (_, other) in zip(run.model.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(after.data, before[name] - 0.5 * other.grad, rtol=1e-5, atol=1e-8)


def test_larger_first_scores_are_a_lower_rate():
    """AdamW's steps do not depend on the gradient's size, nor a mask on that of all scores."""
    ids, found = tiny_batch(), []
    for times in (1, 4):  # a power of two: exact
        model = SupermaskGPT2LMHeadModel(tiny_config())
        with torch.no_grad():
            for scores in model.parameters():
                scores.mul_(times)
        optimizer = build_optimizer(model, RunArguments(learning_rate=1e-2 * times))
        for _ in range(5):
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([scores / times for scores in model.parameters()])
    first = SupermaskGPT2LMHeadModel(tiny_config()).parameters()
    assert not any(torch.equal(one, other) for one, other in zip(first, found[0], strict=True))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("rule", "selection"), [("edge_popup", "keep_largest"), ("global", "keep_largest_of_all")]
)
def test_masks_are_selected_once_per_forward(arguments, monkeypatch, rule, selection):
    run = Run(arguments("--gradient_accumulation_steps", "4", "--rule", rule))
    calls, keep = [], getattr(rules, selection)

    def count(*args, **options):
        calls.append(1)
        return keep(*args, **options)

    monkeypatch.setattr(rules, selection, count)
    optimizer_step(run)
    each = 1 if rule == "global" else len(run.config.tensor_names())  # the tied table too
    assert len(calls) == 4 * each


def test_a_log_is_read_up_to_a_line_that_is_none(tmp_path):
    line = json.dumps({"kind": "train", "step": 1, "loss": 2.0}) + "\n"
    for bad in (b"\xff\xfe\x00\n", b'{"kind": "tr', b"7\n", b'{"loss": 1}\n'):
        (tmp_path / "log.jsonl").write_bytes(line.encode() + bad + line.encode())
        assert len(read_log(tmp_path / "log.jsonl")) == 1


def test_the_gradient_is_divided_once_however_accelerate_was_launched(arguments, monkeypatch):
    """`accelerate launch --gradient_accumulation_steps N` sets the variable."""
    norms = []
    for launched in ("1", "2"):
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", launched)
        run = Run(arguments("--gradient_accumulation_steps", "2", "--overwrite"))
        optimizer_step(run)
        norms.append(run.check_gradient())
        run.close()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        del run  # and with it the lock of the folder
    assert norms[0] == norms[1]
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    with pytest.raises(SLTError, match="is 4 for accelerate and 2 for this run"):
        Run(arguments("--gradient_accumulation_steps", "2", "--overwrite"))


def test_a_run_that_is_not_sharded_as_configured_says_so(arguments, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    training.print_once.cache_clear()
    Run(arguments())
    assert "shards nothing on device cpu: this run is NO" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--gradient_checkpointing", "--torch_compile"])
def test_options_of_speed_and_memory_change_no_loss(arguments, flag):
    plain, other = Run(arguments("--dropout", "0")), Run(arguments("--dropout", "0", flag))
    for _ in range(2):
        losses = [optimizer_step(run).item() for run in (plain, other)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("way", ["option", "accelerate's configuration"])
def test_bf16_keeps_scores_in_float32(arguments, monkeypatch, way):
    exact = optimizer_step(Run(arguments("--dropout", "0"))).item()
    AcceleratorState._reset_state(reset_partial_state=True)
    if way != "option":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as `accelerate launch` passes it on
    run = Run(arguments("--dropout", "0", *(["--bf16"] if way == "option" else [])))
    assert run.accelerator.mixed_precision == "bf16"
    loss = optimizer_step(run).item()
    assert exact != loss == pytest.approx(exact, rel=1e-2)
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}


# -- whole runs ---------------------------------------------------------------------------------------


def test_a_run_learns_and_leaves_a_ticket(uninterrupted):
    folder, report = uninterrupted
    curve = losses(folder)
    assert len(curve) == 12
    assert curve[-1] < curve[0] - 1
    header = verify_ticket(folder / "ticket")
    model = AutoModelForCausalLM.from_pretrained(folder / "ticket")
    tokenizer = AutoTokenizer.from_pretrained(folder / "ticket")
    assert header.tensors["wte"].shape == (len(tokenizer), 32)
    assert json.loads((folder / "report.json").read_text())["loss"] == report["loss"]
    assert model.config.density == 0.3


def test_the_report_is_what_an_independent_evaluation_finds(uninterrupted, text):
    folder, report = uninterrupted
    model = AutoModelForCausalLM.from_pretrained(folder / "ticket")
    tokenizer = AutoTokenizer.from_pretrained(folder / "ticket")
    ids = tokenizer((text / "valid.txt").read_text())["input_ids"] + [tokenizer.eos_token_id]
    blocks = torch.tensor(ids[: len(ids) // 32 * 32]).view(-1, 32)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(
            model(blocks).logits[:, :-1].flatten(0, 1), blocks[:, 1:].flatten()
        ).item()
    assert report["loss"] == pytest.approx(loss, rel=1e-5)
    assert report["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def test_the_log_has_the_masks(uninterrupted):
    looks = [record for record in read_log(uninterrupted[0] / "log.jsonl") if record["kind"] == "masks"]
    assert [record["step"] for record in looks] == [6, 12]
    assert looks[0]["flipped"] == 0  # nothing before it
    assert 0 < looks[1]["flipped"] < 0.5
    assert all(value == pytest.approx(0.3, abs=0.01) for value in looks[1]["density"].values())


def test_moments_are_logged_where_asked_and_change_nothing(arguments, uninterrupted, tmp_path):
    find_ticket(arguments("--moments", "--save_steps", "0"))
    assert mask_bytes(tmp_path / "run") == mask_bytes(uninterrupted[0])
    assert not [r for r in read_log(uninterrupted[0] / "log.jsonl") if r["kind"] == "moments"]
    records = [r for r in read_log(tmp_path / "run" / "log.jsonl") if r["kind"] == "moments"]
    assert [r["step"] for r in records] == [6, 12]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "ticket")
    ids = torch.as_tensor(load_blocks(arguments().data).validation[np.arange(8)]["input_ids"]).long()
    np.testing.assert_allclose(records[-1]["trace"], attention_moments(model, ids), rtol=1e-4)
    np.testing.assert_allclose(
        records[-1]["relative"], attention_moments(model, ids, relative=True), rtol=1e-4
    )
    assert np.shape(records[-1]["trace"]) == (2, 2)  # layers, heads
    assert records[-1]["lowest"] == np.min(records[-1]["relative"])


@pytest.mark.parametrize("words", [["--torch_compile"], ["--control", "dense"]])
def test_moments_of_a_compiled_model_and_of_a_control(arguments, words):
    run = Run(arguments("--moments", "--max_steps", "2", "--dropout", "0", *words))
    optimizer_step(run)
    run.evaluate()
    assert np.shape(run.log.records[-1]["trace"]) == (2, 2)
    assert run.model.training


def test_a_look_counts_flips_and_warns_of_collapse(caplog):
    before, after = torch.zeros(4, 10, dtype=torch.bool), torch.zeros(4, 10, dtype=torch.bool)
    before[:, 0] = after[:2, 0] = True
    from transformers.utils import logging

    logging.get_logger("hf_slt.training.monitoring").addHandler(caplog.handler)
    tensors = {"h.0.mlp.c_fc.scores": TensorSpec("h.0.mlp.c_fc", (4, 10), input_axes=(0,))}
    seen = mask_measures(tensors, {"h.0.mlp.c_fc.scores": after}, {"h.0.mlp.c_fc.scores": before}, (0.0, 1.0))
    assert seen["flipped"] == 2 / 40
    assert seen["density"] == {"h.0.mlp.c_fc.scores": pytest.approx(0.05)}
    assert seen["empty_columns"] == {"h.0.mlp.c_fc.scores": pytest.approx(0.9)}
    after[:, 0] = False
    mask_measures(tensors, {"h.0.mlp.c_fc.scores": after}, {}, (0.0, 1.0))
    assert "100% of its outputs have no weight left" in caplog.text


def test_a_look_at_codes_of_more_levels():
    before = torch.tensor([[0, 1, 2], [1, 1, 1]], dtype=torch.uint8)
    after = torch.tensor([[0, 2, 2], [1, 1, 1]], dtype=torch.uint8)
    tensors = {"wte.scores": TensorSpec("wte", (2, 3), input_axes=(1,))}
    seen = mask_measures(tensors, {"wte.scores": after}, {"wte.scores": before}, (-1.0, 0.0, 1.0))
    assert seen["flipped"] == 1 / 6
    assert seen["density"] == {"wte.scores": 0.5}
    assert seen["empty_columns"] == {"wte.scores": 0.5}  # of a table: rows
    seen = mask_measures(tensors, {"wte.scores": before > 0}, {}, (-1.0, 1.0))
    assert (seen["density"], seen["empty_columns"]) == ({"wte.scores": 1.0}, {"wte.scores": 0.0})


def test_controls_and_their_table(base, tmp_path, capsys):
    found = parse_arguments(
        [*base, "--output_dir", str(tmp_path / "run"), "--compare", *CONTROLS, "--prompt", "the cat"]
    )
    report = train_and_compare(found, find_ticket, TEMPLATE)
    gap = (report["random_mask"] - report["ticket"]) / (report["random_mask"] - report["dense"])
    assert report["gap_closed"] == pytest.approx(gap)
    assert report["random_mask"] > max(report["ticket"], report["dense"])
    assert json.loads((tmp_path / "run" / "report.json").read_text()) == report
    shown = capsys.readouterr().out
    assert all(
        word in shown for word in ("random mask", "dense twin", "frozen embeddings", "gap closed", "the cat")
    )
    for path in ("comparison.png", "ticket/README.md", "ticket/masks.png", "ticket/curves.png", "curves.png"):
        assert (tmp_path / "run" / path).stat().st_size > 1000, path
    assert isinstance(
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "dense" / "model"), GPT2LMHeadModel
    )
    frozen = verify_ticket(tmp_path / "run" / "frozen_embeddings" / "ticket")
    assert frozen.tensors["wte"].kind == "frozen"
    assert not (tmp_path / "run" / "random_mask" / "ticket" / "README.md").exists()  # a card is of the ticket
    card = (tmp_path / "run" / "ticket" / "README.md").read_text()
    assert f"| ticket | {report['ticket']:.4f} |" in card
    assert f"| random mask | {report['random_mask']:.4f} |" in card
    assert verify_ticket(tmp_path / "run" / "random_mask" / "ticket").tensors["wte"].kind == "masked"


def test_a_signal_ends_the_controls_too(base, tmp_path, monkeypatch, capsys):
    words = [*base, "--output_dir", str(tmp_path / "run"), "--compare", "random_mask", "dense"]
    monkeypatch.setattr(
        "hf_slt.training.monitoring.Interruption.agreed", lambda self, accelerator, step: True
    )
    assert train_and_compare(parse_arguments(words), find_ticket, TEMPLATE) is None
    assert "interrupted after step 1; resume with --resume_from_checkpoint" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "run").glob("[!.]*")) == ["checkpoints", "log.jsonl"]


def test_a_run_alone_ends_with_its_validation_loss(base, tmp_path, capsys):
    words = [*base, "--output_dir", str(tmp_path / "run"), "--max_steps", "2"]
    report = train_and_compare(parse_arguments(words), find_ticket, TEMPLATE)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ticket ")]
    assert line.split()[1] == f"{report['loss']:.3f}"


def test_a_run_in_a_thread(arguments, uninterrupted):
    """As from a notebook's tool: signals are the main thread's."""
    reports = []
    thread = threading.Thread(target=lambda: reports.append(find_ticket(arguments())))
    thread.start()
    thread.join()
    assert mask_bytes(Path(reports[0]["saved"]).parent) == mask_bytes(uninterrupted[0])


def test_two_signals_at_once_are_one_wish():
    with Interruption() as interruption:
        for _ in range(3):  # the terminal's and the launcher's
            os.kill(os.getpid(), signal.SIGTERM)
        assert interruption.asked
        interruption.since -= 60
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_that_diverges_stops(arguments, monkeypatch):
    run = Run(arguments())
    monkeypatch.setattr(run.accelerator, "clip_grad_norm_", lambda *a: torch.tensor(float("nan")))
    with pytest.raises(SLTError, match="a gradient before step 1 was not finite: the run diverged") as caught:
        train(run)
    # What it advises is taken; to go on from a checkpoint at another rate is not.
    assert "--overwrite" in str(caught.value)
    assert "--resume" not in str(caught.value)
    Run(arguments("--overwrite", "--learning_rate", "0.001"))


def test_the_ramp_ends_at_the_density_of_the_ticket(arguments):
    report = find_ticket(arguments("--ramp_start", "1", "--ramp_steps", "12", "--density", "0.2"))
    folder = Path(report["saved"]).parent
    last = [record for record in read_log(folder / "log.jsonl") if record["kind"] == "masks"][-1]
    assert all(value == pytest.approx(0.2, abs=0.01) for value in last["density"].values())
    model = AutoModelForCausalLM.from_pretrained(folder / "ticket")
    measured = evaluate_blocks(model, [load_blocks(arguments().data).validation[:]["input_ids"]])
    assert measured["loss"] == pytest.approx(report["loss"], rel=1e-6)


def test_relaxed_steps_use_no_mask_and_the_run_resumes_to_the_same_bits(arguments, tmp_path, monkeypatch):
    words = ["--relaxed_steps", "0.5", "--eval_steps", "4", "--dropout", "0"]
    run = Run(arguments(*words, "--output_dir", str(tmp_path / "kinds")))
    plan = run.model.transformer.h[0].mlp.c_fc.parameter_plans["weight"]
    kinds = []
    while run.done < run.steps:
        optimizer_step(run)
        kinds.append(type(plan.rule))
    assert kinds == [Relaxed] * 6 + [rules.EdgePopup] * 6

    report = find_ticket(arguments(*words, "--output_dir", str(tmp_path / "whole")))
    model = AutoModelForCausalLM.from_pretrained(report["saved"])
    measured = evaluate_blocks(model, [load_blocks(arguments().data).validation[:]["input_ids"]])
    assert measured["loss"] == pytest.approx(report["loss"], rel=1e-5)
    save = Run.save

    def killed(run):
        save(run)
        if run.done == 4:  # in the relaxed part
            raise ConnectionError

    monkeypatch.setattr(Run, "save", killed)
    with pytest.raises(ConnectionError):
        find_ticket(arguments(*words))
    monkeypatch.setattr(Run, "save", save)
    with pytest.raises(CheckpointError, match="relaxed_steps was 6, is 3"):
        find_ticket(arguments(*words, "--relaxed_steps", "3", "--resume_from_checkpoint"))
    find_ticket(arguments(*words, "--resume_from_checkpoint"))
    assert mask_bytes(tmp_path / "run") == mask_bytes(tmp_path / "whole")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_the_rate_of_trained_weights_starts_again_when_masks_begin(arguments):
    words = ["--scales", "row", "--max_steps", "8", "--relaxed_steps", "4", "--min_lr_rate", "0"]
    words += ["--learning_rate", "0.5", "--weight_learning_rate", "0.1", "--weight_restart", "0.2"]
    run = Run(arguments(*words, "--warmup_steps", "0"))
    rates = []
    while run.done < run.steps:
        run.begin_step()
        rates.append([group["lr"] for group in run.optimizer.param_groups])
        run.done += 1
    falling = [(1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
    again = [(1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]
    assert [scores for scores, _ in rates] == pytest.approx([0.5 * share for share in falling])
    expected = [0.1 * share for share in falling[:4]] + [0.2 * share for share in again]
    assert [weights for _, weights in rates] == pytest.approx(expected)


def test_mask_steps_use_a_mask_several_times_and_the_run_resumes_to_the_same_bits(
    arguments, tmp_path, monkeypatch
):
    words = ["--mask_steps", "3", "--relaxed_steps", "2", "--eval_steps", "4", "--dropout", "0"]
    run = Run(arguments(*words, "--output_dir", str(tmp_path / "steps")))
    masks = []
    while run.done < run.steps:
        optimizer_step(run)
        masks.append(id(run.held))
    assert [masks.count(one) for one in dict.fromkeys(masks)] == [2, 3, 3, 3, 1]  # the first two are relaxed

    find_ticket(arguments(*words, "--output_dir", str(tmp_path / "whole")))
    save = Run.save

    def killed(run):
        save(run)
        if run.done == 4:  # the mask of step 2 is also that of step 4
            raise ConnectionError

    monkeypatch.setattr(Run, "save", killed)
    with pytest.raises(ConnectionError):
        find_ticket(arguments(*words))
    monkeypatch.setattr(Run, "save", save)
    find_ticket(arguments(*words, "--resume_from_checkpoint"))
    assert mask_bytes(tmp_path / "run") == mask_bytes(tmp_path / "whole")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_no_dense_twin_of_what_stock_gpt2_cannot_be(arguments):
    with pytest.raises(SLTError, match="no dense twin"):
        find_ticket(arguments("--control", "dense", "--layer_norm", "false"))


def test_the_dense_twin_has_first_weights_and_a_rate_of_its_own(arguments):
    words = ["--control", "dense", "--dense_std", "0.05", "--dense_learning_rate", "4e-3"]
    run = Run(arguments(*words, "--weight_learning_rate", "1e-3"))
    assert run.model.transformer.wte.weight.std().item() == pytest.approx(0.05, rel=0.02)
    assert [group["initial_lr"] for group in run.optimizer.param_groups] == [4e-3]


def test_trackers(arguments, tmp_path):
    find_ticket(arguments("--report_to", "tensorboard", "--max_steps", "2", "--save_steps", "0"))
    assert list((tmp_path / "run").rglob("events*"))


# -- never lose a run ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "at", [(4, 0), (5, 1), (7, 1)], ids=["at a checkpoint", "mid-accumulation", "mid-epoch"]
)
def test_resumed_to_the_same_bits(arguments, uninterrupted, monkeypatch, at):
    """An error in the middle, at a step and micro-batch; then --resume_from_checkpoint."""
    of_step = Batches.of_step

    def failing(self, step):
        for micro, batch in enumerate(of_step(self, step)):
            if (step, micro) == at:
                raise InterruptedError("power cut")
            yield batch

    monkeypatch.setattr(Batches, "of_step", failing)
    with pytest.raises(InterruptedError):
        find_ticket(arguments())
    monkeypatch.undo()
    report = find_ticket(arguments("--resume_from_checkpoint"))
    folder = Path(report["saved"]).parent
    assert mask_bytes(folder) == mask_bytes(uninterrupted[0])
    assert losses(folder) == losses(uninterrupted[0])
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (
            load_file(path / "checkpoints" / "step-00000012" / name) for path in (folder, uninterrupted[0])
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == sorted(path.name for path in (uninterrupted[0] / "checkpoints").iterdir())


BESIDE = [
    ["--rule", "edge_popup", "--search", "0.4", "--tie_word_embeddings", "false"],
    ["--rule", "sign", "--scales", "row", "--layer_norm", "trained", "--head_bias"],
    ["--rule", "n_m", "--embedding", "trained", "--embedding_rank", "8", "--embedding_bits", "4"],
]


def scores_name(tensor: str) -> str:
    """The parameter that holds the scores of a tensor."""
    module, _, leaf = tensor.rpartition(".")
    own = f"{module}.{leaf}_scores" if leaf in ("query", "key", "value", "basis") else f"{tensor}.scores"
    return own if tensor == "lm_head" else f"transformer.{own}"


@pytest.mark.parametrize("words", [*(["--rule", rule] for rule in rules.RULES), *BESIDE], ids=" ".join)
def test_runs_of_every_rule_log_their_codes_and_resume(arguments, monkeypatch, tmp_path, words):
    words = [*words, "--max_steps", "4", "--save_steps", "2", "--eval_steps", "2"]
    report = find_ticket(arguments(*words))
    header = verify_ticket(tmp_path / "run" / "ticket")
    last = [record for record in read_log(tmp_path / "run" / "log.jsonl") if record["kind"] == "masks"][-1]
    shares = {
        scores_name(name): kept_of(header, entry) / sum(entry.counts)
        for name, entry in header.masked().items()
    }
    assert last["density"] == pytest.approx(shares, abs=1e-6)  # float32 means
    model = AutoModelForCausalLM.from_pretrained(report["saved"])
    measured = evaluate_blocks(model, [load_blocks(arguments().data).validation[:]["input_ids"]])
    assert measured["loss"] == pytest.approx(report["loss"], rel=1e-5)

    class PowerCut(Exception):
        pass

    def fail(self, step):
        if step == 3:
            raise PowerCut
        return of_step(self, step)

    of_step = Batches.of_step
    monkeypatch.setattr(Batches, "of_step", fail)
    again = [*words, "--output_dir", str(tmp_path / "again")]
    with pytest.raises(PowerCut):
        find_ticket(arguments(*again))
    monkeypatch.undo()
    find_ticket(arguments(*again, "--resume_from_checkpoint"))
    assert mask_bytes(tmp_path / "again") == mask_bytes(tmp_path / "run")
    flips = [
        [record["flipped"] for record in read_log(tmp_path / name / "log.jsonl") if record["kind"] == "masks"]
        for name in ("run", "again")
    ]
    assert flips[0] == flips[1]


def launch(words, folder, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(SCRIPT), *words, "--output_dir", str(folder)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def wait_for_step(folder: Path, step: int, process) -> None:
    for _ in range(1200):
        if (folder / "log.jsonl").exists() and len(losses(folder)) >= step:
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    raise TimeoutError(f"step {step} was not reached")


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)],
    ids=lambda number: number.name,
)
def test_killed_and_resumed_to_the_same_bits(base, tmp_path, number):
    """A real process, 60 steps; the same run straight through is the oracle."""
    words = [*base, "--max_steps", "60", "--save_steps", "10", "--eval_steps", "30"]
    run = launch(words, tmp_path / "run")
    wait_for_step(tmp_path / "run", 25, run)
    run.send_signal(number)
    output, errors = run.communicate(timeout=120)
    reached = len(losses(tmp_path / "run"))
    assert reached < 60, "the run was over before the signal"
    if number == signal.SIGKILL:
        assert run.returncode == -signal.SIGKILL
    else:  # a checkpoint of this very step, and a clean end
        assert run.returncode == 130, errors  # there is no ticket
        assert f"interrupted after step {reached}; resume with --resume_from_checkpoint" in output
        assert (tmp_path / "run" / "checkpoints" / f"step-{reached:08d}").is_dir()
    again = launch([*words, "--resume_from_checkpoint"], tmp_path / "run")
    output, errors = again.communicate(timeout=300)
    assert again.returncode == 0, errors
    assert "resumed after step" in output
    preset = SCRIPT.with_name("nano.yaml")  # the script's, where none is named
    find_ticket(parse_arguments([*words, "--output_dir", str(tmp_path / "whole")], preset=preset))
    assert mask_bytes(tmp_path / "run") == mask_bytes(tmp_path / "whole")


def test_another_run_is_refused_with_the_difference(arguments):
    find_ticket(arguments())
    with pytest.raises(
        CheckpointError, match="is of an earlier run; add --resume_from_checkpoint or --overwrite"
    ):
        find_ticket(arguments())
    with pytest.raises(
        CheckpointError, match=r"of another run: density was 0.3, is 0.5, learning_rate was 0.01, is 0.02"
    ):
        find_ticket(arguments("--resume_from_checkpoint", "--density", "0.5", "--learning_rate", "0.02"))
    assert (
        find_ticket(arguments("--resume_from_checkpoint", "--logging_steps", "3"))["steps"] == 12
    )  # free to change
    assert find_ticket(arguments("--overwrite", "--density", "0.5", "--max_steps", "2"))["steps"] == 2


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


DAMAGE = {
    "model.safetensors": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "optimizer.safetensors": lambda path: path.unlink(),
    "state.json": lambda path: edit(path, '"step": 12', '"step": 11'),
    "beta": lambda path: edit(path, "0.999", "0.99"),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-30]),
    "no object": lambda path: path.write_text("[1]"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_offered(arguments, uninterrupted, tmp_path, kind):
    find_ticket(arguments())
    folder = tmp_path / "run" / "checkpoints"
    DAMAGE[kind](folder / "step-00000012" / (kind if "." in kind else "state.json"))
    with pytest.raises(CheckpointError, match="step-00000012") as caught:
        find_ticket(arguments("--resume_from_checkpoint"))
    words = str(caught.value).split("resume with ")[1].split()
    assert words == ["--resume_from_checkpoint", str(folder / "step-00000008")]
    find_ticket(arguments(*words))
    assert mask_bytes(tmp_path / "run") == mask_bytes(uninterrupted[0])
    find_ticket(arguments("--resume_from_checkpoint"))  # it was written anew


def test_the_only_checkpoint_damaged(arguments, tmp_path):
    find_ticket(arguments("--save_total_limit", "1", "--eval_steps", "0"))
    (path,) = (tmp_path / "run" / "checkpoints").iterdir()
    (path / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000012.*--overwrite"):
        find_ticket(arguments("--resume_from_checkpoint", "--eval_steps", "0"))


def test_a_run_of_a_level_rate_can_be_extended(arguments, tmp_path):
    level = ["--min_lr_rate", "1", "--warmup_steps", "2", "--ramp_start", "0.6", "--ramp_steps", "9"]
    find_ticket(arguments(*level, "--output_dir", str(tmp_path / "whole"), "--max_steps", "18"))
    find_ticket(arguments(*level))
    report = find_ticket(arguments(*level, "--resume_from_checkpoint", "--max_steps", "18"))
    assert report["steps"] == 18
    assert mask_bytes(tmp_path / "run") == mask_bytes(tmp_path / "whole")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    with pytest.raises(CheckpointError, match=r"steps was 18, is 12 .*longer, not shorter"):
        find_ticket(arguments(*level, "--resume_from_checkpoint"))
    share = ["--warmup_steps", "0.2"]  # of all steps, so that more of them have a longer warm-up
    with pytest.raises(CheckpointError, match=r"warmup_steps was 2, is 4"):
        find_ticket(arguments(*level, *share, "--resume_from_checkpoint", "--max_steps", "19"))


def test_a_cosine_cannot_be_extended_and_says_why(arguments):
    find_ticket(arguments())
    with pytest.raises(CheckpointError, match=r"steps was 12, is 18 \(.*cosine.*min_lr_rate 1"):
        find_ticket(arguments("--resume_from_checkpoint", "--max_steps", "18"))


def test_a_folder_that_cannot_be_used_is_refused_before_text_is_read(base, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_slt.training.report.load_blocks", lambda *_: pytest.fail("text was read"))
    (tmp_path / "file").write_text("")
    (tmp_path / "used" / "dense").mkdir(parents=True)
    (tmp_path / "used" / "dense" / "report.json").write_text("{}")
    for name, more, message in (
        ("file", [], "file is a file, not a folder; give the name of a folder"),
        ("file/run", [], "file is a file, not a folder"),
        ("used", ["--compare", "dense"], "used/dense is of an earlier run; add --resume_from_checkpoint or"),
    ):
        words = [*base, "--output_dir", str(tmp_path / name), *more]
        with pytest.raises((OSError, SLTError), match=message):
            train_and_compare(parse_arguments(words), find_ticket, TEMPLATE)
        assert train_and_compare(parse_arguments([*words, "--dry_run"]), find_ticket, TEMPLATE) == {}


@pytest.mark.parametrize("package", ["matplotlib", "constriction"])
def test_a_missing_package_is_named_before_text_is_read(base, tmp_path, monkeypatch, package):
    monkeypatch.setattr("hf_slt.training.report.load_blocks", lambda *_: pytest.fail("text was read"))
    monkeypatch.setitem(sys.modules, package, None)
    words = [*base, "--output_dir", str(tmp_path / "run"), "--encoding", "entropy"]
    with pytest.raises(SLTError, match=f"the package {package} is not installed; pip install"):
        train_and_compare(parse_arguments(words), find_ticket, TEMPLATE)


def test_processes_that_do_not_know_each_other_are_refused(base, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # as a launcher sets it, without the rank that accelerate looks for
    monkeypatch.setattr("hf_slt.training.report.load_blocks", lambda *_: pytest.fail("text was read"))
    words = [*base, "--output_dir", str(tmp_path / "run")]
    with pytest.raises(SLTError, match="write ACCELERATE_USE_CPU=true before accelerate launch"):
        train_and_compare(parse_arguments(words), find_ticket, TEMPLATE)


def test_a_warm_up_longer_than_the_run_is_said_once(arguments, capsys):
    training.print_once.cache_clear()
    for _ in range(2):
        Run(arguments("--warmup_steps", "500", "--overwrite"))
    shown = capsys.readouterr().out
    assert shown.count("warmup_steps 500 is more than the 12 steps of this run") == 1
    training.print_once.cache_clear()
    Run(arguments("--warmup_steps", "12", "--overwrite"))
    assert "warmup_steps" not in capsys.readouterr().out


def test_two_runs_do_not_share_a_folder(arguments, base, tmp_path):
    run = launch([*base, "--max_steps", "2000"], tmp_path / "run")
    try:
        wait_for_step(tmp_path / "run", 1, run)
        with pytest.raises(CheckpointError, match="another run is writing there"):
            find_ticket(arguments("--overwrite"))
        assert losses(tmp_path / "run")
    finally:
        run.kill()
        run.communicate()
    find_ticket(arguments("--overwrite"))  # a lock ends with its process


@pytest.mark.parametrize("way", ["too many", "--overwrite"])
def test_a_killed_removal_leaves_whole_checkpoints(arguments, uninterrupted, tmp_path, monkeypatch, way):
    class Killed(BaseException):
        pass

    rmtree = checkpoints.shutil.rmtree

    def kill(path, **options):
        if options:  # of a stage, which goes when it was renamed
            return rmtree(path, **options)
        next(path.iterdir()).unlink()
        raise Killed

    if way == "--overwrite":
        find_ticket(arguments())
    # Removed are those of the earlier run; or each when the next is written.
    words = ["--save_steps", "2", "--save_total_limit", "1"] if way == "too many" else [way]
    monkeypatch.setattr(checkpoints.shutil, "rmtree", kill)
    with pytest.raises(Killed):
        find_ticket(arguments(*words))
    monkeypatch.undo()
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        assert len(list(path.iterdir())) == 3
    find_ticket(arguments("--resume_from_checkpoint"))
    assert mask_bytes(tmp_path / "run") == mask_bytes(uninterrupted[0])
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_resumed_from_a_checkpoint_by_its_path(arguments, uninterrupted, tmp_path, monkeypatch):
    """An earlier one, of another folder: the run goes on here to the same bits, and so does its log."""
    find_ticket(arguments("--save_total_limit", "5"))
    earlier = tmp_path / "run" / "checkpoints" / "step-00000004"
    elsewhere = tmp_path / "elsewhere"
    words = ["--resume_from_checkpoint", str(earlier), "--output_dir", str(elsewhere)]
    find_ticket(arguments(*words))
    assert mask_bytes(elsewhere) == mask_bytes(uninterrupted[0])
    # In its own folder, later ones go as soon as the run that went back has one to go on from.
    monkeypatch.setattr(Run, "evaluate", lambda self: (_ for _ in ()).throw(InterruptedError))
    with pytest.raises(InterruptedError):
        find_ticket(arguments("--resume_from_checkpoint", str(earlier), "--save_steps", "5"))
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000005"]
    assert losses(elsewhere) == losses(uninterrupted[0])
    with pytest.raises(CheckpointError, match=r"step-9: no such folder; .*checkpoints holds step-00000008, "):
        find_ticket(arguments("--output_dir", str(elsewhere), "--resume_from_checkpoint", "step-9"))


def test_a_full_disk_leaves_the_previous_checkpoint_whole(arguments, uninterrupted, tmp_path, monkeypatch):
    save_file, calls = checkpoints.save_file, []

    def full(tensors, path):
        calls.append(path)
        if len(calls) > 3:  # two files of the first checkpoint, one of the second
            Path(path).write_bytes(b"half a file")
            raise OSError(28, "No space left on device")
        save_file(tensors, path)

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(CheckpointError, match=r"step-00000006: cannot be written .*No space left"):
        find_ticket(arguments())
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]
    report = find_ticket(arguments("--resume_from_checkpoint"))
    assert mask_bytes(Path(report["saved"]).parent) == mask_bytes(uninterrupted[0])


def test_last_checkpoints_and_the_best_are_kept(arguments, tmp_path, monkeypatch):
    worse = iter([1.0, 2.0, 3.0, 4.0])
    evaluate = training.evaluate_blocks
    monkeypatch.setattr(
        training, "evaluate_blocks", lambda *a, **k: {**evaluate(*a, **k), "loss": next(worse)}
    )
    find_ticket(arguments("--eval_steps", "3", "--save_steps", "2", "--save_total_limit", "2"))
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000010", "step-00000012"]  # best, last two


def test_a_full_disk_is_one_line(base, tmp_path):
    """A real one: no file may grow beyond so many bytes."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    load_blocks(parse_arguments(base).data)  # the cache is larger
    run = launch(base, tmp_path / "run", preexec_fn=limit)
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 1
    assert "Traceback" not in errors
    assert errors.strip().splitlines()[-1].startswith("CheckpointError: ")
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_the_script_reports_errors_in_one_line(tmp_path):
    run = launch(["--train_files", "nowhere.txt"], tmp_path / "run", cwd=tmp_path)
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 1
    assert errors.strip().splitlines()[-1].startswith("DataError: there is no file 'nowhere.txt'")
    assert "Traceback" not in errors


# -- more than one process ----------------------------------------------------------------------------

SHARDED = """
import json, os, sys, torch
from pathlib import Path
from torch.distributed.fsdp import FSDPModule, fully_shard
from hf_slt.masks.rules import RULES
from hf_slt.training import run as training
from hf_slt.training.arguments import parse_arguments

sys.path.insert(0, sys.argv[1])
from train_gpt2_slt import train

class Sharded(training.Run):
    def _prepare(self, model):  # accelerate shards on accelerators only; torch does on CPUs too
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
        return model, self.accelerator.prepare(self.make_optimizer(model, self.options))

"""

WORKER = (
    SHARDED
    + """
sent = []
broadcast = torch.distributed._broadcast_coalesced
def counted(group, tensors, *rest):
    sent.extend(tensor.numel() for tensor in tensors)
    return broadcast(group, tensors, *rest)
torch.distributed._broadcast_coalesced = counted

kind, words = sys.argv[2], sys.argv[3:]
run = (Sharded if kind == "fsdp2" else training.Run)(parse_arguments(words))
assert run.accelerator.num_processes == 2
if kind == "fsdp2":
    assert isinstance(run.model, FSDPModule)
    assert all(isinstance(block, FSDPModule) for block in run.model.transformer.h)
    assert {type(parameter.data).__name__ for parameter in run.model.parameters()} == {"DTensor"}
else:
    assert type(run.model).__name__ == "DistributedDataParallel"
assert train(run)
report = run.finish()
assert bool(report) == run.accelerator.is_main_process
model = training.build_model(run.arguments, run.corpus.tokenizer)
facts = {"sent": sum(sent), "scores": sum(p.numel() for p in model.parameters())}
print("SENT", json.dumps(facts), flush=True)
"""
)


def launch_two(folder: Path, script: str, *words: str) -> subprocess.CompletedProcess:
    """A script in two real processes; its first argument is the folder of the recipes."""
    (folder / "worker.py").write_text(script)
    return launch_file_twice(folder / "worker.py", str(SCRIPT.parent), *words)


def launch_file_twice(file: Path, *words: str) -> subprocess.CompletedProcess:
    """Run a file in two real processes."""
    run = start_file_twice(file, *words)
    output, errors = run.communicate(timeout=600)
    assert run.returncode == 0, errors[-3000:]
    return subprocess.CompletedProcess(run.args, run.returncode, output, errors)


def start_file_twice(file: Path, *words: str) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    command = [
        *(sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"),
        *("--config_file", str(ROOT / "recipes" / "accelerate" / "cpu_ddp.yaml"), "--main_process_port", "0"),
        *(str(file), *words),
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, cwd=ROOT, **pipes)


@pytest.mark.slow
def test_two_processes_that_stream_are_killed_and_resume_to_the_same_bits(text, base, tmp_path):
    """One parquet file, which both processes read; all of them are killed at once, as by a machine that fails."""
    lines = (text / "train.txt").read_text().splitlines()
    table = pyarrow.table(
        {"text": ["\n".join(lines[place : place + 3]) for place in range(0, len(lines), 3)]}
    )
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet", row_group_size=50)
    words = [*base, "--train_files", str(tmp_path / "train.parquet")]
    words += ["--streaming", "--tokenizer", str(text / "valid-tokenizer"), "--eval_steps", "100"]
    train_tokenizer(lines, 300, 32).save_pretrained(text / "valid-tokenizer")
    words += ["--max_steps", "100", "--save_steps", "20", "--output_dir"]
    run = start_file_twice(SCRIPT, *words, str(tmp_path / "run"))
    wait_for_step(tmp_path / "run", 25, run)
    for process in (launcher := psutil.Process(run.pid), *launcher.children(recursive=True)):
        process.kill()
    run.communicate(timeout=60)
    assert len(losses(tmp_path / "run")) < 100, "the run was over before the signal"
    again = launch_file_twice(SCRIPT, *words, str(tmp_path / "run"), "--resume_from_checkpoint")
    assert "resumed after step" in again.stdout
    launch_file_twice(SCRIPT, *words, str(tmp_path / "whole"))
    assert mask_bytes(tmp_path / "run") == mask_bytes(tmp_path / "whole")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "network"),
    [
        ("mini", {"HF_ENDPOINT": "http://127.0.0.1:9"}),
        ("small", {"HF_HUB_OFFLINE": "1"}),
    ],  # the Hub does not answer; the Hub must not be asked
    ids=["no answer", "offline"],
)
def test_without_a_network_a_preset_of_the_hub_ends_with_one_line(tmp_path, preset, network):
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "cache"), **network}
    command = [sys.executable, str(SCRIPT), "--config", str(SCRIPT.with_name(f"{preset}.yaml"))]
    command += ["--output_dir", str(tmp_path / "run")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    (line,) = run.stderr.splitlines()  # a retry would print more lines
    assert line.startswith("DataError: cannot load data set Salesforce/wikitext")
    assert "use train_files, or leave dataset out for the embedded corpus" in line


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_agree_with_one(base, tmp_path, kind):
    common = [
        *base,
        "--dropout",
        "0",
        "--max_steps",
        "20",
        "--gradient_accumulation_steps",
        "1",
        "--save_steps",
        "10",
    ]
    common += ["--moments", "--relaxed_steps", "8", "--mask_steps", "3"]
    one = find_ticket(
        parse_arguments(
            [*common, "--per_device_train_batch_size", "8", "--output_dir", str(tmp_path / "one")]
        )
    )
    words = [*common, "--per_device_train_batch_size", "4", "--output_dir", str(tmp_path / "two")]
    run = launch_two(tmp_path, WORKER, kind, *words)
    # Sums of gradients are rounded in another order. A score that lies at the threshold to the last bits may then be
    # kept by one side only: the loss of that step differs a little more, and the next steps agree again.
    apart = np.abs(np.subtract(losses(tmp_path / "two"), losses(tmp_path / "one")))
    assert apart.max() < 1e-3
    assert np.sort(apart)[-4] < 1e-5
    first, second = (
        [r["trace"] for r in read_log(tmp_path / name / "log.jsonl") if r["kind"] == "moments"]
        for name in ("one", "two")
    )
    np.testing.assert_allclose(second, first, rtol=1e-3)
    two = json.loads((tmp_path / "two" / "report.json").read_text())
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-4)
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "ticket") for name in ("one", "two")]
    same = total = 0
    for name, mask in models[0].mask_arrays().items():
        same, total = same + int((mask == models[1].mask_arrays()[name]).sum()), total + mask.size
    assert same >= 0.999 * total
    assert len(read_log(tmp_path / "two" / "log.jsonl")) == len(read_log(tmp_path / "one" / "log.jsonl"))
    if kind == "ddp":  # once, at the start: scores and no frozen weight
        facts = json.loads(run.stdout.split("SENT", 1)[1].splitlines()[0])
        assert 0 < facts["sent"] <= facts["scores"]


@pytest.mark.slow
def test_controls_in_two_processes(base, tmp_path):
    """The README's command under cpu_ddp.yaml: every run after the first needs the process group too."""
    words = [
        *base,
        "--max_steps",
        "4",
        "--eval_steps",
        "2",
        "--save_steps",
        "0",
        "--report_to",
        "tensorboard",
    ]
    folder = tmp_path / "run"
    more = ["--output_dir", str(folder), "--compare", "random_mask", "dense", "--prompt", "the cat"]
    done = launch_file_twice(SCRIPT, "--config", str(SCRIPT.with_name("nano.yaml")), *words, *more)
    rows = [line.split("  ")[0] for line in done.stdout.splitlines() if line.endswith(" kB")]
    assert sorted(rows) == ["dense twin", "random mask", "ticket"]
    report = json.loads((folder / "report.json").read_text())
    assert report["random_mask"] > max(report["ticket"], report["dense"])
    for run in (folder, folder / "random_mask", folder / "dense"):  # each with a tracker of its own
        assert [path for path in (run / "hf_slt").rglob("events*") if path.stat().st_size > 100]
    for path in ("comparison.png", "ticket/README.md", "dense/curves.png"):
        assert (folder / path).stat().st_size > 1000, path
    assert "Traceback" not in done.stderr
    assert "destroy_process_group() was not called" not in done.stderr


def test_the_trackers_of_a_run_are_finished_also_after_an_error(arguments, monkeypatch):
    finished = []
    monkeypatch.setattr(TensorBoardTracker, "finish", lambda self: finished.append(self.run_name))
    words = ["--report_to", "tensorboard", "--max_steps", "2", "--save_steps", "0", "--overwrite"]
    assert find_ticket(arguments(*words))
    monkeypatch.setattr(Run, "finish", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        find_ticket(arguments(*words))
    assert len(finished) == 2


EVERY_RULE = (
    SHARDED
    + """
for rule in RULES:
    folder = Path(sys.argv[2], rule)
    arguments = parse_arguments([*sys.argv[3:], "--rule", rule, "--output_dir", str(folder)])
    run = training.Run(arguments)
    assert run.accelerator.num_processes == 2
    assert train(run)
    model = run.accelerator.unwrap_model(run.model)
    torch.save(model.state_dict(), f"{folder}-{run.accelerator.process_index}.pt")
    run.finish()

words = [*sys.argv[3:], "--rule", "global", "--output_dir", str(Path(sys.argv[2], "sharded"))]
run = Sharded(parse_arguments(words))  # blocks whose scores are ranked together are shards elsewhere
assert train(run)
run.finish()
"""
)


@pytest.mark.slow
def test_two_processes_agree_with_one_by_every_rule(base, tmp_path):
    """One launch for all rules; both processes have the same bits, and but for rounding those of one."""
    words = [*base, *"--dropout 0 --max_steps 4 --gradient_accumulation_steps 1 --eval_steps 0".split()]
    launch_two(tmp_path, EVERY_RULE, str(tmp_path / "two"), *words, "--per_device_train_batch_size", "4")
    np.testing.assert_allclose(
        losses(tmp_path / "two" / "sharded"), losses(tmp_path / "two" / "global"), atol=1e-4
    )
    for rule in rules.RULES:
        ours, theirs = (torch.load(tmp_path / "two" / f"{rule}-{rank}.pt") for rank in range(2))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), rule
        folders = [tmp_path / name / rule for name in ("one", "two")]
        more = ["--per_device_train_batch_size", "8", "--rule", rule, "--output_dir", str(folders[0])]
        find_ticket(parse_arguments([*words, *more]))
        AcceleratorState._reset_state(reset_partial_state=True)
        one, two = map(losses, folders)
        if rule == "bernoulli":  # its chance follows from every bit of the scores: after a step it is another
            one, two = one[:1], two[:1]
        np.testing.assert_allclose(two, one, atol=1e-4, err_msg=rule)
        masks = [AutoModelForCausalLM.from_pretrained(path / "ticket").mask_arrays() for path in folders]
        same = sum(int((mask == masks[1][name]).sum()) for name, mask in masks[0].items())
        assert same >= 0.999 * sum(mask.size for mask in masks[0].values()) or rule == "bernoulli", rule


# -- other architectures -----------------------------------------------------------------------------------


def test_a_llama_by_a_real_launch_with_its_dense_twin(base, tmp_path):
    """The recipe on a Llama whose sizes a file names: ticket, dense twin, card and samples."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    (tmp_path / "small.json").write_text(
        json.dumps({**sizes, "model_type": "llama", "num_key_value_heads": 2})
    )
    words = ["--architecture", "llama", "--base_config", str(tmp_path / "small.json"), "--rule", "signed"]
    words += ["--compare", "dense", "--max_steps", "4", "--save_steps", "0", "--prompt", "the cat"]
    words += ["--output_dir", str(tmp_path / "run"), "--parameters", "*norm=trained"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    launch = {"capture_output": True, "text": True, "check": False, "env": environment}
    done = subprocess.run([sys.executable, str(SCRIPT), *base, *words], **launch)
    assert done.returncode == 0, done.stderr
    assert "dense twin continues 'the cat'" in done.stdout
    ticket = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "ticket")
    assert type(ticket).__name__ == "SupermaskLlamaForCausalLM"
    twin = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "dense" / "model")
    assert type(twin).__name__ == "LlamaForCausalLM"
    assert twin.num_parameters() == ticket.num_parameters()
    assert ticket.config.num_key_value_heads == 2
    assert ticket.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / "run" / "ticket"))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["loss"] < 6
    assert (tmp_path / "run" / "ticket" / "README.md").read_text().count("A llama model") == 1
    verify_ticket(tmp_path / "run" / "ticket")


def test_an_architecture_that_cannot_be_is_refused():
    with pytest.raises(SLTError, match="'lama' cannot be made; did you mean llama"):
        Arguments.of(architecture="lama")
    with pytest.raises(SLTError, match="'vit' has no causal language model"):
        Arguments.of(architecture="vit")
    with pytest.raises(SLTError, match="n_qk is an option of GPT-2 only"):
        Arguments.of(architecture="llama", n_qk=8)
    of_sizes = Arguments.of(architecture="llama", n_layer=3, n_embd=64, n_head=4, rule="signed").model
    found = of_sizes.hidden_size, of_sizes.intermediate_size, of_sizes.num_hidden_layers, of_sizes.rule
    assert found == (64, 256, 3, "signed")
