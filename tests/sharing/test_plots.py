"""Figures: what is drawn is what the records say; files appear whole; neither torch nor pyplot is loaded."""

import math
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from hf_slt.sharing import plots
from hf_slt.sharing.plots import choose_tensors, density_map, plot_comparison, plot_masks, plot_run, smooth
from hf_slt.tickets.files import replacing

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


def make_records(steps: int = 200, end: float = 4.0, masks: bool = True) -> list[dict]:
    records: list[dict] = []
    for step in range(10, steps + 1, 10):
        loss = end + 3 * math.exp(-step / 50)
        records.append({"kind": "train", "step": step, "loss": loss, "rate": 0.01 * (1 - step / steps)})
        if step % 50 == 0:
            records.append({"kind": "evaluation", "step": step, "loss": loss + 0.1})
            if masks:
                records.append({"kind": "masks", "step": step, "flipped": 0.0 if step == 50 else 1 / step})
    return records


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, to look into."""
    figures = []
    save = plots._save

    def keep(figure, path):
        figures.append(figure)
        return save(figure, path)

    monkeypatch.setattr(plots, "_save", keep)
    return figures


def lines(axes) -> dict[str, tuple[list, list]]:
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.get_lines()
        if not line.get_label().startswith("_")
    }


def labelled(figure) -> bool:
    """Every panel says what its axes are; of stacked panels the lowest says it for all."""
    return all(axes.get_ylabel() for axes in figure.axes) and bool(figure.axes[-1].get_xlabel())


@pytest.fixture(autouse=True)
def _plain_style():
    """As matplotlib comes: other tests of this process may have set a style of their own."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield


def test_a_run_shows_its_records(tmp_path, drawn):
    records = make_records()
    path = plot_run(records, tmp_path / "new" / "curves.png", "a run")
    assert path.read_bytes().startswith(PNG)
    (figure,) = drawn
    loss, rate, flipped = figure.axes
    assert labelled(figure)
    assert loss.get_title("left") == "a run"
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    steps, losses = lines(loss)[f"validation, {evaluations[-1]['loss']:.3f} at the end"]
    assert steps == [record["step"] for record in evaluations]
    assert losses == [record["loss"] for record in evaluations]
    assert rate.get_lines()[0].get_ydata()[-1] == 0
    assert flipped.get_yscale() == "log"
    assert list(flipped.get_lines()[0].get_ydata()) == [1 / 100, 1 / 150, 1 / 200]  # 0 has no logarithm


@pytest.mark.parametrize(
    ("records", "panels"),
    [
        (make_records(masks=False), 2),  # a dense run has no masks
        ([{"kind": "evaluation", "step": 0, "loss": 7.0}], 1),  # a control that is never trained
        ([{"kind": "train", "step": 1, "loss": math.nan, "rate": 0.1}, *make_records(masks=False)], 2),
        ([{"kind": "train", "step": 1, "loss": 2.0}], 1),
    ],
)
def test_panels_without_a_point_are_left_out(records, panels, tmp_path, drawn):
    plot_run(iter(records), tmp_path / "a.png", "x")
    assert len(drawn[0].axes) == panels


def test_a_comparison_holds_curves_and_a_level_line(tmp_path, drawn):
    runs = {
        "random mask": [{"kind": "evaluation", "step": 0, "loss": 7.5}],
        "ticket": make_records(end=5.0),
        "dense twin": make_records(masks=False),
        "not evaluated": [{"kind": "train", "step": 1, "loss": 2.0}],
    }
    plot_comparison(runs, tmp_path / "a.png", "x")
    (axes,) = drawn[0].axes
    assert labelled(drawn[0])
    found = lines(axes)
    assert len(found) == 3
    assert found["random mask: 7.500"][1] == [7.5, 7.5]
    last = runs["ticket"][-2]["loss"]
    assert found[f"ticket: {last:.3f}"][0] == [50, 100, 150, 200]


def test_masks_are_drawn_one_of_a_kind(tmp_path, drawn):
    choose = np.random.default_rng(0)
    names = ["wte", *(f"h.{block}.{kind}" for block in range(3) for kind in ("attn.c_proj", "mlp.c_fc"))]
    masks = {name: choose.random((64, 32)) < 0.3 for name in names}
    masks["wte"][:] = False  # collapsed
    path = plot_masks(masks, tmp_path / "masks.png", "masks")
    assert path.read_bytes().startswith(PNG)
    titles = [axes.get_title() for axes in drawn[0].axes if axes.get_title()]
    kept = masks["h.1.attn.c_proj"].mean()
    assert [title.split("\n")[0] for title in titles] == ["wte", "h.1.attn.c_proj", "h.1.mlp.c_fc"]
    assert titles[1] == f"h.1.attn.c_proj\n64 x 32, {kept:.1%} kept"
    images = [image for axes in drawn[0].axes for image in axes.get_images()]
    assert np.array_equal(images[1].get_array(), density_map(masks["h.1.attn.c_proj"]))


@pytest.mark.parametrize("count", [1, 2, 5, 8, 12])
@pytest.mark.parametrize("shape", [(1, 1), (3, 200), (64, 64)])
def test_any_number_and_shape_of_masks(count, shape, tmp_path):
    masks = {f"tensor_{chr(97 + i)}": np.random.default_rng(i).random(shape) < 0.5 for i in range(count)}
    assert plot_masks(masks, tmp_path / "a.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (64, 9), (300, 1030)])
def test_density_map_is_the_mean_of_each_cell(shape):
    mask = np.random.default_rng(1).random(shape) < 0.4
    cells = density_map(mask)
    edges = [np.linspace(0, n, k + 1).astype(int) for n, k in zip(shape, cells.shape, strict=True)]
    for i in range(cells.shape[0]):
        for j in range(cells.shape[1]):
            part = mask[edges[0][i] : edges[0][i + 1], edges[1][j] : edges[1][j + 1]]
            assert cells[i, j] == part.mean()


def test_smoothing_keeps_lines_and_lengths():
    line = np.linspace(3.0, 1.0, 101)
    assert np.allclose(smooth(line, 11), line)  # no lag, and no bend at the ends
    assert len(smooth(np.array([]))) == 0
    assert smooth(np.array([2.0])).tolist() == [2.0]


def test_choice_of_tensors_is_limited():
    assert choose_tensors([f"{letter}" for letter in "abcdefghij"], 3) == ["a", "b", "c"]


def test_nothing_to_plot_is_said(tmp_path):
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_run([], tmp_path / "a.png", "x")
    with pytest.raises(ValueError, match="no evaluation in the records of ticket"):
        plot_comparison({"ticket": []}, tmp_path / "a.png", "x")
    with pytest.raises(ValueError, match="no mask is given"):
        plot_masks({}, tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_file_before(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")

    def fail():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.txt", "before")]


def test_no_torch_no_pyplot():
    code = """
import sys, tempfile, types
package = types.ModuleType("hf_slt")  # without its __init__, which loads transformers
package.__path__ = ["hf_slt"]
sys.modules["hf_slt"] = package
from hf_slt.sharing import plots
assert "matplotlib" not in sys.modules
with tempfile.TemporaryDirectory() as folder:
    plots.plot_run([{"kind": "evaluation", "step": 0, "loss": 1.0}], folder + "/a.png", "x")
assert "torch" not in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
