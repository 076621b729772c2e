"""Figure 8 on prose: the paper's setting, the rate that validates best, a text that is not there."""

import figure8_prose as study
import pytest
import studies

from hf_slt.errors import SLTError


def records_of(tmp_path, losses):
    records = studies.Records(tmp_path / "records.json", [], keep=True)
    preset = study.PRESETS["night"]
    for point, loss in zip(study.rate_points(preset), losses, strict=True):
        records.add(point, {"loss": -loss, "validation_loss": loss})
    return records


def test_every_run_is_in_the_setting_of_the_paper():
    for name, preset in study.PRESETS.items():
        for point in study.factor_points(preset, 3e-3):
            model = studies.loop_arguments(
                **{key: one for key, one in point.items() if key != "test_part"}
            ).model
            assert (model.rule, model.density, model.law, model.scales) == (
                "edge_popup",
                0.3,
                "normal",
                "none",
            )
            assert model.n_embd // model.n_head == 64
            assert model.initializer_range == 0.02  # at width 768, unless the preset leaves it as it is
            assert model.scale_with_width == (name in ("hour", "night"))
    seeds, factors = study.PRESETS["night"].seeds, study.PRESETS["night"].factors
    assert len(study.factor_points(study.PRESETS["night"], 3e-3)) == seeds * len(factors) >= 14


def test_the_rate_is_chosen_on_validation_and_not_on_the_test_part(tmp_path):
    preset = study.PRESETS["night"]
    assert study.chosen_rate(preset, records_of(tmp_path, (5.0, 4.0, 4.5))) == preset.rates[1]


def test_a_text_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SLTError, match=r"no enwiki2014-train.parquet .* --data"):
        study.check_text(study.PRESETS["hour"])


def test_the_figure_has_the_mean_of_every_factor(tmp_path, capsys):
    preset = study.PRESETS["night"]
    points = study.factor_points(preset, 3e-3)
    found = [{"of": point, "loss": point["qk_scale"] + point["seed"]} for point in points]
    options = studies.argparse.Namespace(out=tmp_path, preset="night")
    study.draw(found, preset, studies.Study("figure8_prose", "hour", options))
    assert (tmp_path / "figures" / "night" / "figure8_prose.png").stat().st_size > 10_000
    assert "factor 2.83: 3.330 (2.830, 3.830)" in capsys.readouterr().out
