"""A rule of one's own, with options of its own: from the configuration to a run, a checkpoint and a ticket."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cases import IDS, logits_of, tiny_config, train_a_little
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hf_slt import SupermaskGPT2Config, SupermaskGPT2LMHeadModel, TicketError, verify_ticket
from hf_slt.masks.modules import masked_parameters
from hf_slt.masks.rules import RULES, ScoreContext, StraightThroughRule, rule_option
from hf_slt.training.arguments import Arguments, parse_arguments

SCRIPT = Path(__file__).parents[2] / "recipes" / "train_gpt2_slt.py"
OWN = {"rule": "mine", "density": None}  # the density of the tiny model is edge-popup's


@dataclass(frozen=True)
class Mine(StraightThroughRule):
    """Keep what scores above the mean, or above some standard deviations more."""

    temperature: float | int = rule_option(1.0, "Size of a step in the gradient.")
    above: float | int = rule_option(0.0, "Standard deviations above the mean.")

    def check(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature {self.temperature} is not positive")

    def codes(self, scores: Tensor, context: ScoreContext) -> Tensor:
        return scores > scores.mean() + self.above * scores.std()

    def surrogate(self, scores: Tensor) -> Tensor:
        return scores * self.temperature

    def surrogate_grad(self, scores: Tensor) -> Tensor:
        return torch.full_like(scores, self.temperature)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(RULES, "mine", Mine)


def test_options_reach_the_rule():
    config = SupermaskGPT2Config(rule="mine", temperature=3.0)
    assert config.make_rule() == Mine(temperature=3.0)
    assert config.temperature == 3.0
    assert config.supermask["rule_options"] == {"temperature": 3.0, "above": 0.0}
    nested = SupermaskGPT2Config(supermask={"rule": "mine", "rule_options": {"temperature": 3.0}})
    assert nested.supermask == config.supermask
    assert SupermaskGPT2Config(supermask={"rule": "mine"}).make_rule() == Mine()
    assert SupermaskGPT2Config(supermask={"seed": 3}).seed == 3
    model = SupermaskGPT2LMHeadModel(tiny_config(**OWN, temperature=3.0, above=0.5))
    rules = {plan.rule for _, _, _, plan in masked_parameters(model)}
    assert rules == {Mine(temperature=3.0, above=0.5)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "mine", "temprature": 3.0}, "unknown option 'temprature'.*did you mean 'temperature'"),
        ({"rule": "mine", "temperature": -1.0}, "temperature -1.0 is not positive"),
        ({"rule": "mine", "temperature": "warm"}, "temperature 'warm' of rule 'mine' is not a number"),
        (
            {"rule": "mine", "density": 0.3},
            "density 0.3 is no option of rule 'mine', which has temperature, above",
        ),
        ({"rule": "edge_popup", "temperature": 3.0}, "temperature 3.0 is no option of rule 'edge_popup'"),
        ({"supermask": {"rule": "mine", "rule_options": {"heat": 1}}}, "heat 1 is no option of rule 'mine'"),
        ({"supermask": {"rule": "mine", "temperature": 3.0}}, "unknown option 'temperature' in supermask"),
    ],
)
def test_a_wrong_option_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        SupermaskGPT2Config(**options)


def test_options_change_gradients_and_masks():
    gradients, kept = {}, {}
    for options in ({}, {"temperature": 3.0}, {"above": 0.5}):
        model = SupermaskGPT2LMHeadModel(tiny_config(**OWN, **options))
        model(IDS, labels=IDS).loss.backward()
        name = next(iter(options), "default")
        gradients[name] = model.transformer.h[0].mlp.c_fc.scores.grad
        kept[name] = model.mask_arrays()["h.0.mlp.c_fc"].mean()
    torch.testing.assert_close(gradients["temperature"], 3 * gradients["default"])
    assert kept["default"] == kept["temperature"] == pytest.approx(0.5, abs=0.05)
    assert kept["above"] < 0.4


def test_scores_and_ticket_are_loaded_again(tmp_path, monkeypatch):
    model = train_a_little(SupermaskGPT2LMHeadModel(tiny_config(**OWN, temperature=3.0, above=0.5)))
    model.save_pretrained(tmp_path / "scores")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "scores")
    assert again.config.make_rule() == Mine(3.0, 0.5)
    assert torch.equal(logits_of(again), logits_of(model))

    header = model.save_ticket(tmp_path / "ticket")
    stored = json.loads((tmp_path / "ticket" / "config.json").read_text())["supermask"]
    assert stored["rule_options"] == header.options["rule_options"] == {"temperature": 3.0, "above": 0.5}
    # A ticket is used where its rule is unknown.
    monkeypatch.delitem(RULES, "mine")
    verify_ticket(tmp_path / "ticket")
    assert AutoConfig.from_pretrained(tmp_path / "ticket").temperature == 3.0
    ticket = AutoModelForCausalLM.from_pretrained(tmp_path / "ticket")
    assert torch.equal(logits_of(ticket), logits_of(model))
    assert ticket.generation_config.temperature is None  # an option of the same name
    ticket.save_ticket(tmp_path / "copy")
    assert verify_ticket(tmp_path / "copy").digest == header.digest


def test_options_are_those_of_a_run(capsys):
    found = parse_arguments(["--rule", "mine", "--temperature", "3"])
    assert found.model.make_rule() == Mine(temperature=3.0)
    assert found.flat()["temperature"] == 3.0
    assert Arguments.of(rule="mine", above=0.5).model.make_rule() == Mine(above=0.5)
    with pytest.raises(SystemExit):
        parse_arguments(["--rule", "mine", "--temperature", "-3"])
    assert "temperature -3.0 is not positive" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_arguments(["--rule", "edge_popup", "--temperature", "3"])
    assert "is no option of rule 'edge_popup'" in capsys.readouterr().err


# -- in a file, named on the command line ---------------------------------------------------------------------

FILE = '''
"""Rules of a user."""
from __future__ import annotations
from dataclasses import dataclass
from hf_slt.masks.rules import Rule, StraightThroughRule, rule_option

@dataclass(frozen=True)
class AboveMedian(StraightThroughRule):
    """Keep what scores above the median of its output."""

    temperature: float = rule_option(1.0, "Size of a step in the gradient.")
    signs: tuple = rule_option((0, 1), "Not used.")
    factors = (0.0, 1.0)

    def codes(self, scores, context):
        return scores > scores.median(dim=context.tensor.input_axes[0], keepdim=True).values

    def surrogate_grad(self, scores):
        return scores.new_full(scores.shape, 1 / self.temperature)

class Bare(AboveMedian): ...

@dataclass(frozen=True)
class Empty(Rule): ...

@dataclass(frozen=True)
class Clash(AboveMedian):
    dropout: float = 0.5

other = 3
'''


@pytest.fixture
def file(tmp_path, monkeypatch):
    for name in ("AboveMedian", "Clash"):
        monkeypatch.setitem(RULES, name, None)  # so that what a test adds is taken away again
        del RULES[name]
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "mine.py"
    sys.modules.pop("mine", None)


@pytest.mark.parametrize("place", ["mine.py:AboveMedian", "{folder}/mine.py:AboveMedian", "mine:AboveMedian"])
def test_a_rule_of_a_file_or_module_has_its_options_from_preset_and_command_line(file, place, capsys):
    place = place.format(folder=file.parent)
    (file.parent / "p.yaml").write_text("density: 0.5\ntemperature: 2.5\nmax_steps: 7\n")
    words = ["--config", "p.yaml", "--rule", place]
    found = parse_arguments(words).model  # the preset's density is that of another rule
    assert (found.rule, found.rule_options) == ("AboveMedian", {"temperature": 2.5, "signs": [0, 1]})
    found = parse_arguments([*words[:2], f"--rule={place}", "--temperature", "4", "--signs", "1", "2"]).model
    assert found.rule_options == {"temperature": 4.0, "signs": [1, 2]}
    assert type(found.make_rule()).__name__ == "AboveMedian"
    with pytest.raises(SystemExit):
        parse_arguments([*words, "--help"])
    assert "Size of a step in the gradient." in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("none.py:AboveMedian", "rule none.py:AboveMedian: there is no file none.py in"),
        ("no_such_module:AboveMedian", "no_such_module cannot be read: ModuleNotFoundError"),
        ("mine.py:AboveMedan", "no class 'AboveMedan' in mine.py; did you mean AboveMedian?"),
        ("mine.py:", "no class '' in mine.py; "),
        ("mine.py:other", "other is not a class derived from hf_slt.masks.rules.Rule"),
        ("mine.py:Bare", "Bare is not a dataclass; write @dataclass(frozen=True) above it"),
        ("mine.py:Empty", "Empty does not define codes"),
        ("mine.py:Clash", "option dropout of Clash is taken by another; rename it"),
        ("wrong.py:A", "wrong.py cannot be read: ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_no_rule_is_refused_in_one_line(file, place, message, capsys):
    (file.parent / "wrong.py").write_text("1 / 0")
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["--rule", place])
    shown = capsys.readouterr().err
    assert (ended.value.code, shown.count("\n")) == (2, 1)
    assert message in shown


def test_no_preset_and_no_configuration_runs_code(file, capsys):
    (file.parent / "boom.py").write_text("raise SystemExit('was run')")
    (file.parent / "p.yaml").write_text("rule: boom.py:Boom\n")
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["--config", "p.yaml"])
    assert ended.value.code == 2
    assert "give it on the command line: --rule boom.py:Boom" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"rule 'boom\.py:Boom' is not one of"):
        SupermaskGPT2Config(rule="boom.py:Boom")
    SupermaskGPT2LMHeadModel(tiny_config()).save_ticket(file.parent / "ticket")
    config = json.loads((file.parent / "ticket" / "config.json").read_text())
    config["supermask"]["rule"] = "boom.py:Boom"
    (file.parent / "ticket" / "config.json").write_text(json.dumps(config))
    with pytest.raises(TicketError, match="rule"):
        verify_ticket(file.parent / "ticket")


@pytest.mark.slow
def test_the_recipe_trains_with_the_rule_and_its_ticket_loads_without_it(file, tmp_path):
    (tmp_path / "p.yaml").write_text(
        "temperature: 2.0\nn_layer: 1\nn_embd: 16\nn_head: 2\nmax_steps: 3\nvocab_size: 300\nblock_size: 16\n"
        "encoding: entropy\neval_steps: 0\nsave_steps: 0\n"
    )
    (tmp_path / "text.txt").write_text(" ".join(f"word {number} of a text" for number in range(2000)))
    words = (
        "--config p.yaml --rule mine.py:AboveMedian --train_files text.txt --output_dir run --cache_dir cache"
    )
    done = subprocess.run(
        [sys.executable, SCRIPT, *words.split()],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "AboveMedian" not in RULES
    header = verify_ticket(tmp_path / "run" / "ticket")
    assert (header.options["rule"], header.options["factors"]) == ("AboveMedian", [0.0, 1.0])
    assert header.options["rule_options"] == {"temperature": 2.0, "signs": [0, 1]}
    ticket = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "ticket")
    kept = ticket.mask_arrays()["h.0.mlp.c_fc"]
    assert kept.mean(axis=0) == pytest.approx(0.5)  # of every output half its inputs
    assert "| mask rule | `AboveMedian` |" in (tmp_path / "run" / "ticket" / "README.md").read_text()
