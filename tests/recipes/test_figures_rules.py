"""The study of rules: sizes that meet their budget, rivals rounded as they are stored, a run of each kind."""

from pathlib import Path

import figures_rules as study
import pytest
import rivals
import studies

RECIPES = Path(studies.__file__).parent


@pytest.mark.parametrize("name", ["edge_popup", "signed, scales", "dense int4"])
def test_a_wider_budget_is_a_wider_model(name):
    widths = [study.width_for(name, budget) for budget in (60_000, 115_000, 230_000)]
    assert widths == sorted(set(widths))
    assert all(width % study.BASE["n_head"] == 0 for width in widths)


def test_every_contestant_has_rates_and_a_point_of_its_own():
    points = [study.point(name, 115_000, 10, 0, 1e-3) for name in study.CONTESTANTS]
    assert len({str(point) for point in points}) == len(points)
    for shares in study.PRESETS.values():
        for share in shares:
            assert all(study.search_of(name, share.steps) for name in share.contestants)


def test_the_rate_of_the_lowest_loss_is_compared_at_every_size_and_on_every_text(tmp_path):
    text = {"train_files": ["a.txt"]}
    shares = [study.Share(("sign",), size, 300, 2) for size in (60_000, 115_000)]
    tried = study.search_of("sign", 300)
    records = rivals.FlatRecords(tmp_path / "rules.json", tried.values(), keep=True)
    losses = dict(zip(tried, (5.0, 4.9), strict=True))
    for rate, one in tried.items():
        assert not study.rows_of(shares, text, records)
        records.add(one, {"loss": losses[rate], "bytes": 1})
    rows = study.rows_of(shares, text, records)
    assert list(rows) == [(60_000, 300, "sign"), (115_000, 300, "sign")]
    for size, points in zip((60_000, 115_000), rows.values(), strict=True):
        assert [one["seed"] for one in points] == [0, 1]
        assert {one["learning_rate"] for one in points} == {min(losses, key=losses.get)}
        assert {one["n_embd"] for one in points} == {study.width_for("sign", size)}
        assert all(one["train_files"] == ["a.txt"] for one in points)


def test_a_text_is_named_without_its_folder_and_one_elsewhere_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    for name in ("a.txt", "b.txt", "other/b.txt"):
        (tmp_path / name).write_text("text")

    def ask(*files):
        monkeypatch.setattr("sys.argv", ["study", "--train_files", *files])
        return study.parse_options()[1]

    for lost in ("other/b.txt", "c.txt"):
        with pytest.raises(SystemExit):
            ask("a.txt", lost)
        assert lost in capsys.readouterr().err
    assert ask(str(tmp_path / "a.txt"), "b.txt") == {"train_files": ["a.txt", "b.txt"]}


def points_of_rules(text, records):
    shares = study.PRESETS["text" if text else "cpu"]
    tried = {(name, share.steps) for share in shares for name in share.contestants}
    search = [one for name, steps in tried for one in study.search_of(name, steps).values()]
    rows = study.rows_of(shares, text, records)
    return [*search, *(one for points in rows.values() for one in points)]


def test_committed_records_are_those_that_the_page_shows(tmp_path):
    """Every point of the preset has a record on every text that was tried; every record is of a point."""
    text = (RECIPES / "results" / "rules.json").read_text()
    (tmp_path / "copy.json").write_text(text)
    records = rivals.FlatRecords(tmp_path / "copy.json", [], keep=True)
    names = {tuple(record["of"].get("train_files", ())) for record in records.found.values()}
    texts = [{"train_files": list(files)} if files else {} for files in names]
    points = {studies._key(one) for about in texts for one in points_of_rules(about, records)}
    assert points == set(records.found)
    records.write()
    assert records.path.read_text() == text  # the file is as the store leaves it


@pytest.mark.slow
@pytest.mark.parametrize("name", ["multicoat, scales", "dense ternary"])
def test_a_run_is_measured(name):
    point = {**study.point(name, 30_000, 2, 0, 1e-3), "block_size": 32, "validation_blocks": 8}
    found = rivals.measure(**point)
    assert len(found["curve"]) == 2
    assert 5 < found["loss"] < 14
    assert 15_000 < found["bytes"] < 45_000
