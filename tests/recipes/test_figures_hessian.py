"""The curvature study: the task is the authors', the advice evens what it should and reaches the training."""

import json
import math
from functools import partial
from pathlib import Path

import figures_hessian as recipe
import pytest
import studies
import torch
from cases import tiny_config
from train_gpt2_slt import train

from hf_slt import SupermaskGPT2LMHeadModel
from hf_slt.training.run import Run

RESULTS = Path(__file__).parents[2] / "recipes" / "results"


def test_additions_are_sums_with_only_the_answer_predicted():
    batch = recipe.additions(20)
    assert batch["input_ids"].shape == (20, 18)
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        a, _, rest = "".join("0123456789+="[i] for i in ids).partition("+")
        b, _, total = rest.partition("=")
        assert int(a) + int(b) == int(total)
        assert labels == [-100] * 12 + ids[12:]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_authors_norms_are_met():
    points = [
        point
        for point in recipe.points_addition(recipe.PRESETS["full"])
        if point["seed"] < 2 and point["sigma"] <= 1.13
    ]
    ratios = recipe.addition_ratios([{"of": point, **recipe.measure_addition(**point)} for point in points])
    assert len(ratios) == 15
    assert all(0.6 < r["ratio"] < 1.6 for r in ratios), ratios


@pytest.mark.parametrize("part", ["growth", pytest.param("scores", marks=pytest.mark.slow)])
def test_a_record_is_what_its_point_gives(part):
    record = json.loads((RESULTS / f"hessian_full_{part}.json").read_text())["records"][7]
    found = recipe.PARTS[part].measure(**record["of"])
    for key, values in found.items():
        assert values == pytest.approx(record[key], rel=5e-3), key  # machines differ


def test_slopes_are_fitted_in_each_window():
    records = [
        {"of": {"sigma": s}, "outer": {"qq": s**2 if s < 0.5 else s**3, "vv": 0.0}}
        for s in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    ]
    assert recipe.slopes(records, "outer", "qq") == [2, 3]
    assert recipe.slopes(records, "outer", "vv") is None


def test_the_even_scale_is_where_value_and_query_meet():
    def record(scale, law):  # value over query falls as the fourth power, through 1 at 2
        values = {"v": 16.0, "q": scale**4, "k": scale**4}
        of = {"law": law, "layer_norm": True, "n_qk": 16, "qk_scale": scale}
        return {"of": of, "rms": values, "mean_outer": {**values, "v": 1e9}}

    rms, outer = recipe.even_scales([record(scale, "normal") for scale in (1.0, 3.0, 1.5)])
    assert (rms["even_at"], outer["even_at"]) == (2, None)  # no extrapolation
    assert rms["ratio_at"] == {"1": 16, "1.5": 3.16, "3": 0.198}


def test_advice_evens_query_and_value():
    ids = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(0))

    def curvature(scale):
        model = SupermaskGPT2LMHeadModel(tiny_config(n_layer=1, qk_scale=scale))
        rows = recipe.block_curvature(model, ids, ("q", "k", "v"), "score", eigenvalues=False)
        return recipe.value_to_query({row.block: row.rms for row in rows})

    model = SupermaskGPT2LMHeadModel(tiny_config(n_layer=1, qk_scale=1.0))
    advice = recipe.advise(model, ids, factors=(1.0, 2.0, 4.0))
    even = curvature(advice["qk_scale"])
    assert 0.6 < even < 1.6
    assert abs(math.log(curvature(1.0))) > 2 * abs(math.log(even))
    rates = {name: value for name, value in advice.items() if name.endswith("_rate")}
    assert set(rates) == {f"{name}_rate" for name in recipe.GROUPS}
    assert min(rates.values()) < 1 < max(rates.values())
    assert rates["embedding_rate"] == min(rates.values())  # it bends most


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The arguments of a training of two steps in the place of nano's."""
    (tmp_path / "small.txt").write_text("The function returns the value of the name. " * 400)
    words = {
        "train_files": tmp_path / "small.txt",
        "vocab_size": 280,
        "block_size": 32,
        "per_device_train_batch_size": 4,
    }
    shape = {"n_layer": 1, "n_embd": 16, "n_head": 2, "learning_rate": 1e-2, "cache_dir": tmp_path / "cache"}

    def settings(**options):
        return {**words, **shape, "max_steps": 2, "output_dir": tmp_path / "run", **options}

    monkeypatch.setattr(recipe, "nano_settings", settings)
    return lambda **options: studies.loop_arguments(**settings(**options))


def rated(arguments, rates):
    return Run(arguments, make_optimizer=partial(recipe.rated_optimizer, rates))


def test_rates_reach_their_scores_and_no_others(tiny, tmp_path):
    plain, run = Run(tiny(output_dir=tmp_path / "plain")), rated(tiny(), {})
    assert train(plain)
    assert train(run)
    losses = [[r["loss"] for r in one.log.records if r["kind"] == "train"] for one in (plain, run)]
    assert losses[0] == losses[1]  # without rates, it is the ordinary training
    for kind, (_, words) in recipe.GROUPS.items():
        run = rated(tiny(output_dir=tmp_path / kind), {f"{kind}_rate": 0.0})
        before = {name: scores.detach().clone() for name, scores in run.model.named_parameters()}
        train(run)
        still = {name for name, scores in run.model.named_parameters() if scores.equal(before[name])}
        assert still == {name for name in before if any(word in name for word in words)}, kind


def test_each_variant_takes_its_part_of_the_advice(tiny, tmp_path, monkeypatch):
    said = {"qk_scale": 1.5, "query_rate": 2.0, "mlp_rate": 0.25}
    monkeypatch.setattr(recipe, "advice_for", lambda layer_norm, seed: said)
    rates = {"query_rate": 2.0, "mlp_rate": 0.25}
    taken = {"plain": {}, "scale": {"qk_scale": 1.5}, "rates": rates, "both": said}
    for variant in recipe.VARIANTS:
        found = recipe.measure_advice(layer_norm=False, variant=variant, seed=2, steps=3)
        assert found["taken"] == taken[variant]
        scale = {"qk_scale": 1.5} if variant in ("scale", "both") else {}
        arguments = tiny(layer_norm=False, seed=2, max_steps=3, output_dir=tmp_path / variant, **scale)
        run = rated(arguments, rates if variant in ("rates", "both") else {})
        train(run)
        (last,) = (record for record in run.log.records if record["kind"] == "evaluation")
        assert (found["loss"], found["curve"]) == (last["loss"], [[3, round(last["loss"], 4)]])


def test_gains_are_against_the_plain_run_of_the_seed():
    losses = {"plain": (5.0, 6.0), "both": (5.5, 5.75)}
    gains = recipe.advice_gains(
        [
            {"of": {"layer_norm": True, "variant": variant, "seed": seed}, "loss": loss}
            for variant, two in losses.items()
            for seed, loss in enumerate(two)
        ]
    )
    assert [(g["variant"], g["loss"], g["gain"], g["gain_range"]) for g in gains] == [
        ("plain", 5.5, 0, [0, 0]),
        ("both", 5.625, -0.125, [-0.5, 0.25]),
    ]
