"""`bench step` on a cluster of network namespaces, and `bench plot` of what it has written."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("horovod.torch", reason="needs Horovod built against PyTorch")

from test_cluster import BENCH, needs_namespaces

from hvd_compress.bench.models import MODELS
from hvd_compress.bench.plot import rate_of
from hvd_compress.bench.step import _Work

KEYS = {"codec", "hosts", "rate", "step_s", "exposed_s", "encode_s", "decode_s"}
KEYS |= {"bytes_dense", "bytes_sent", "bytes_card", "bytes_headers", "bound_s", "speedup"}


@pytest.mark.parametrize(
    ("model", "tensors", "parameters"),
    [("resnet50", 161, 25_557_032), ("bert-base", 199, 109_482_240), ("lstm", 11, 19_780_400), ("mlp", 6, 20_037_642)],
)
def test_shapes_of_models(model, tensors, parameters):
    shapes = MODELS[model]()
    assert len(shapes) == len(dict(shapes)) == tensors
    assert sum(math.prod(shape) for _, shape in shapes) == parameters


@needs_namespaces
def test_a_step_is_timed_and_counted(tmp_path):
    """Also by the network cards, and what was written can be drawn. Of times what a busy machine does not change."""
    rows = {}
    for rate in ("1gbit", "10gbit"):
        options = ["--model", "mlp", "--codec", "nuqsgd", "--codec", "qsgd:bits=2", "--ddp", "--repetitions", "2"]
        options += ["--compute-ms", "60", "--json", str(tmp_path / f"{rate}.json")]
        command = [*BENCH, "cluster", "--hosts", "2", "--rate", rate, "--", "step", *options]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
        rows[rate] = {row["codec"]: row for row in json.loads((tmp_path / f"{rate}.json").read_text())}
    assert list(rows["1gbit"]) == ["none", "fp16", "bf16", "nuqsgd", "qsgd:bits=2", "ddp", "ddp:fp16"]
    numel, of_none = 20_037_642, rows["1gbit"]["none"]
    assert of_none["speedup"] == 1
    for codec, row in rows["1gbit"].items():
        assert row.keys() >= KEYS
        assert (row["hosts"], row["rate"], row["elements"]) == (2, "1gbit", numel)
        assert row["bytes_dense"] == 4 * numel
        assert row["bytes_sent"] == pytest.approx(row["bytes_card"], rel=0.05)
        assert row["bytes_sent"] == pytest.approx(row["bytes_card"] - row["bytes_headers"], rel=0.05)
        assert 0 < row["bytes_headers"] < 0.1 * row["bytes_card"]
        assert min(row["step_s"], row["local_s"]) >= 0.06  # the compute
        assert row["step_s"] > row["exposed_s"] >= 0
        assert row["step_s"] > row["bytes_card"] / (1.1 * 125e6)  # which is all that a card lets through
        assert row["speedup"] == pytest.approx(of_none["step_s"] / row["step_s"])
        assert row["ratio"] == pytest.approx(row["bytes_dense"] / row["bytes_sent"])
        assert row["bound_s"] == pytest.approx(row["bytes_sent"] / row["bandwidth"])
        assert 0 < row["bandwidth"] < 1.1 * 125e6
        assert (row["encode_s"] > 0) == (codec not in ("none", "fp16", "ddp", "ddp:fp16"))
    assert rows["1gbit"]["nuqsgd"]["bytes_sent"] == pytest.approx(numel / 2, rel=0.05)
    assert rows["1gbit"]["fp16"]["bytes_sent"] == 2 * numel
    out = tmp_path / "plot.svg"
    files = [str(tmp_path / f"{rate}.json") for rate in rows]
    done = subprocess.run([*BENCH, "plot", *files, "--out", str(out)], check=True, timeout=100, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[0].startswith(
        "| codec | MB sent | by card | times fewer | 1gbit: step ms | exposed | bound | speedup | 10gbit: step ms"
    )
    assert [line.split("`")[1] for line in lines[2:]] == list(rows["1gbit"])
    cells = [cell.strip() for cell in lines[5].strip("|").split("|")]
    assert cells[4] == f"{rows['1gbit']['nuqsgd']['step_s'] * 1e3:.0f}"
    assert cells[11] == f"{rows['10gbit']['nuqsgd']['speedup']:.2f}"
    assert all(codec in out.read_text() for codec in ("none", "nuqsgd", "bound"))  # matplotlib writes texts as comments, too


def test_every_step_has_other_gradients_in_the_models_order():
    work = _Work("mlp", 0.2, rank=0)
    parameters = work.parameters()
    noise, seen, order = work._noise.clone(), [], []
    for i, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: order.append(i))
    for _ in range(2):
        order.clear()
        start = time.perf_counter()
        torch.autograd.backward(work.loss(parameters))
        assert time.perf_counter() - start > 0.2
        seen.append([parameter.grad.clone() for parameter in parameters])
        assert order == [5, 4, 3, 2, 1, 0]
        for parameter in parameters:
            parameter.grad.zero_()
            parameter.grad = None
    assert torch.equal(work._noise, noise)
    assert all(not torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert abs(float(seen[1][2].std()) - 1) < 0.01
    other = _Work("mlp", 0, rank=1)
    assert not torch.equal(other._noise, noise)


def test_one_process_has_nothing_to_send(tmp_path):
    options = ["--model", "mlp", "--codec", "qsgd", "--repetitions", "1", "--json", str(tmp_path / "rows.json")]
    subprocess.run([*BENCH, "step", *options], check=True, capture_output=True, timeout=100)
    rows = json.loads((tmp_path / "rows.json").read_text(), parse_constant=pytest.fail)
    assert [(row["bytes_sent"], row["bandwidth"], row["bound_s"], row["ratio"]) for row in rows] == [(0, None, 0, 1)] * 4
    done = subprocess.run(
        [*BENCH, "plot", str(tmp_path / "rows.json")], capture_output=True, text=True, check=False, timeout=100
    )
    assert "of one rank alone" in done.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--repetitions", "0"], "--repetitions 0 is not allowed"),
        (["--compute-ms", "-1"], "--compute-ms -1.0 is not allowed"),
        (["--codec", "zip"], "--codec: no codec is named 'zip'"),
        (["--bucket-bytes", "0"], "step: bucket_bytes=0 is not allowed"),
        (["--json", "/none0/rows.json"], "--json /none0/rows.json cannot be written"),
        (["--card", "none0"], "--card none0: there is no such network card"),
    ],
)
def test_options_that_are_not_allowed(options, text):
    done = subprocess.run(
        [*BENCH, "step", "--model", "mlp", *options], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode != 0
    assert text in done.stderr


@pytest.mark.parametrize(("rate", "bits"), [("100mbit", 1e8), ("1.5gbit", 1.5e9), ("64kbit", 64e3), ("7bit", 7), (None, 80)])
def test_rates(rate, bits):
    assert rate_of({"rate": rate, "bandwidth": 10}) == bits


ROW = {"codec": "none", "model": "mlp", "exchange": "auto", "compute_s": 0.2, "hosts": 2, "ranks": 2, "bucket_bytes": None}
ROW |= {"rate": "1gbit", "bandwidth": 1e8, "bytes_sent": 8e7, "bytes_card": None, "ratio": 1.0, "speedup": 1.0}
ROW |= {"local_s": 0.2, "step_s": 1.0, "exposed_s": 0.8, "bound_s": 0.8}


def plotted(tmp_path, *files, options=()):
    """What `plot` says of files with these contents, and its table."""
    names = [str(tmp_path / f"rows{number}.json") for number in range(len(files))]
    for name, content in zip(names, files, strict=True):
        Path(name).write_text(content if isinstance(content, str) else json.dumps(content))
    command = [sys.executable, "-m", "hvd_compress.bench", "plot", *names, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, cwd=tmp_path)
    assert "Traceback" not in done.stderr
    return done.stderr, done.stdout


def test_rows_that_can_be_drawn(tmp_path):
    said, table = plotted(tmp_path, [ROW], [{**ROW, "rate": "10gbit"}])
    assert said == ""
    assert table.splitlines()[2] == "| `none` | 80.00 |  | 1.0 | 1000 | 800 | 800 | 1.00 | 1000 | 800 | 800 | 1.00 |"
    assert (tmp_path / "benchmark.png").stat().st_size > 1000
    said, table = plotted(tmp_path, [{**ROW, "rate": None}])
    assert said == ""
    assert "800 Mbit/s, measured" in table


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "rows0.json cannot be read"),
        ({}, "rows0.json is not what `step --json` writes, a list of rows"),
        ([], "rows0.json is not what `step --json` writes, a list of rows"),
        ([{"codec": "none"}], "rows0.json is not what `step --json` writes: a row has no model"),
        ([{**ROW, "step_s": "x"}], "rows0.json is not what `step --json` writes: step_s is 'x'"),
        ([{**ROW, "bound_s": None}], "rows0.json is not what `step --json` writes: bound_s is None"),
        ([{**ROW, "rate": "1Gbit"}], "rows0.json: rate 1Gbit is not allowed"),
    ],
)
def test_what_cannot_be_drawn_is_named(content, text, tmp_path):
    assert text in plotted(tmp_path, content)[0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ranks": 8, "rate": "10gbit"}, "the files differ in ranks: "),
        ({"exchange": "allgather", "rate": "10gbit"}, "rows0.json auto, "),
        ({"step_s": 2.0}, "rows1.json is of 1gbit beside "),
        ({"rate": None}, "rows1.json is without a limit beside "),
    ],
)
def test_what_does_not_belong_together_is_named(change, text, tmp_path):
    assert text in plotted(tmp_path, [ROW], [{**ROW, **change}])[0]


@pytest.mark.parametrize("out", ["plot.xyz", "none/plot.png"])
def test_a_plot_that_cannot_be_written_leaves_the_table(out, tmp_path):
    said, table = plotted(tmp_path, [ROW], options=["--out", out])
    assert f"--out {out}: " in said
    assert table.startswith("| codec |")
