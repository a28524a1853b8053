"""The paper's point: CAT needs no more than the best fixed T, which nobody knows before. See the example's docstring."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "cat_logistic_regression.py"


MODELS = {"logistic": [], "cnn": ["--samples", "60"]}


@pytest.fixture(scope="module", params=MODELS)
def rows(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("cat") / "rows.json"
    plot = path.with_suffix(".png")
    options = ["--model", request.param, *MODELS[request.param], "--dense-steps", "30", "--json", str(path)]
    subprocess.run([sys.executable, str(EXAMPLE), *options, "--plot", str(plot)], check=True, capture_output=True, timeout=900)
    assert plot.stat().st_size > 10_000
    return {(row["scheme"], row["cost"].split(",")[0]): row for row in json.loads(path.read_text())}


@pytest.mark.parametrize("cost", ["cost=bits", "cost=packets", "cost=time"])
@pytest.mark.parametrize("scheme", ["topk", "topk+sign", "stochastic"])
def test_cat_costs_no_more_than_the_best_fixed_number(rows, scheme, cost):
    row = rows[scheme, cost]
    assert row["ratio"] <= 1.1
    assert len(row["fixed"]) >= 8
    assert sorted(row["fixed"].values())[-1] > 3 * row["cat"]  # and of the others, some cost much more
