"""The theory study: its fits find what they should, and its records can be measured again."""

import json
from pathlib import Path

import figures_theory as recipe
import numpy as np
import pytest

RESULTS = Path(__file__).parents[2] / "recipes" / "results"


def test_fits_recover_what_made_the_errors():
    n = np.arange(4.0, 40.0, 4.0)
    assert recipe.fit_mean(n, 0.8 * np.exp(-0.06 * n)) == pytest.approx([0.8, 0.06], rel=1e-3)
    floor = np.maximum(3 * np.exp(-0.3 * n), 1e-4)
    assert recipe.fit_log(n, floor, floor=1e-3) == pytest.approx([3, 0.3], rel=1e-3)
    shared = recipe.fit_shared_rate(n, [factor * np.exp(-0.1 * n) for factor in (1, 2, 5)])
    assert shared["rate"] == pytest.approx(0.1, rel=1e-3)
    assert shared["factors"] == pytest.approx([1, 2, 5], rel=1e-3)


@pytest.mark.parametrize(
    ("figure", "settings"),
    [
        ("fig4", {"target": "untrained", "construction": "balanced", "n": 12}),
        ("fig5", {"target": "trained", "n": 20}),
        ("constant", {"d1": 2, "heads": 2, "construction": "proof", "n": 16}),
        pytest.param("fig6", {"blocks": 2, "construction": "balanced", "n": 100}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_record_is_what_its_point_gives(figure, settings):
    records = json.loads((RESULTS / f"theory_paper_{figure}.json").read_text())["records"]
    record = next(iter(recipe.select(records, **settings, sources=[0, 10])))
    found = recipe.PARTS[figure].measure(**{**record["of"], "sources": [0, 2]})
    rounding = 1e-8 if figure == "fig5" else 0  # its long inputs are computed in float32
    for key, values in found.items():
        np.testing.assert_allclose(values, record[key][:2], rtol=2e-4, atol=rounding, err_msg=key)
