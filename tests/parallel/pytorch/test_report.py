"""What people see of a compression: the report, a line for a progress bar, TensorBoard, and Horovod's timeline."""

import re
import time

import horovod.torch as hvd
import pytest
from helpers import Vectors, compressed, convnet, distributed, loss_of, random

from hvd_compress.torch import APMSqueeze, TensorBoardStats


def train(model, optimizer, steps):
    for number in range(steps):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()


def rows_of(report):
    """The cells of each line of a report by the first one, as its columns are aligned."""
    _, head, *lines = report.splitlines()
    starts = [i for i in range(len(head)) if head[i] != " " and head[max(i - 2, 0) : i] in ("", "  ")]
    assert len(starts) == 11
    return {line.split()[0]: line.split() for line in lines}


def test_the_report_has_what_each_parameter_sent():
    model = convnet()
    optimizer, compression = distributed(model, "topk:fraction=0.1", overrides={"4.weight": "qsgd:bits=2"})
    train(model, optimizer, 4)
    rows = rows_of(compression.report())
    names = [name for name, _ in model.named_parameters()]
    assert list(rows) == [*names, max(rows, key=len), "all"]  # a line between
    total = compression.stats.total
    of_4 = total.parameters["4.weight"]
    assert rows["4.weight"][:3] == ["4.weight", "64x256", "qsgd:bits=2,bucket=512"]
    assert rows["4.weight"][3].startswith("bucket.")
    assert "4.weight" in rows["4.weight"][3] or rows["4.weight"][3] == "bucket.0:2.weight..6.weight"
    bits = f"{8 * of_4.payload_bytes / 4 / (64 * 256):.3f}"
    assert 2 < float(bits) < 2.2
    assert bits in rows["4.weight"]
    assert f"{of_4.ratio:.1f}" in rows["4.weight"]
    assert rows["2.weight"][-3] == f"{round(0.1 * 16 * 16 * 9) / (16 * 16 * 9):.3%}"
    assert rows["2.weight"][-2] == f"{total.parameters['2.weight'].residual_norm:.3g}"
    assert rows["0.bias"][2:4] == ["none", "allreduce"]
    assert f"{total.ratio:.1f}" in rows["all"]


def test_bits_are_those_of_what_was_encoded():
    """APMSqueeze begins dense: those steps have no bits."""
    model = convnet()
    optimizer = APMSqueeze(model.named_parameters(), 1e-3, freeze_step=3)
    compression = optimizer.compression
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression)
    train(model, optimizer, 4)
    row = rows_of(compression.report())["4.weight"]
    assert row[3].startswith("bucket.")
    assert row[4:6] == ["or", "allreduce"]
    numel = 64 * 256
    assert f"{8 * compression.stats.step.parameters['4.weight'].payload_bytes / numel:.3f}" in row
    assert compression.stats.total.parameters["4.weight"].encoded == 1
    assert compression.stats.total.encoded == 3


def test_before_the_first_step_there_is_a_report():
    compression = compressed(convnet(), "cat")
    assert compression.report().startswith("nothing was sent yet; one process alone sends nothing\n")
    assert " or allreduce" not in compression.report()
    assert len(compression.report().splitlines()) == 1 + 1 + 8 + 1 + 1


def test_a_change_of_codec_is_told():
    model = convnet()
    optimizer, compression = distributed(model, "adacomp")
    compression.set_codec("topk:fraction=0.1")  # before anything was sent
    train(model, optimizer, 2)
    assert compression.report().splitlines()[0] == "mean of 2 steps, of this rank"
    for spec in ("qsgd:bits=4", "onebit"):
        compression.set_codec(spec)
        train(model, optimizer, 1)
    title = compression.report().splitlines()[0]
    assert title.startswith("mean of 4 steps, of this rank; the codec was changed after 2, 3 of them: ")


def test_a_line_for_a_progress_bar():
    model = convnet()
    optimizer, compression = distributed(model, "adacomp")
    train(model, optimizer, 1)
    step = compression.stats.step
    summary = compression.stats.summary()
    assert summary.startswith(f"{step.ratio:.1f}x fewer bytes, {step.bytes_sent / 1000:.2f} kB sent, encode ")
    assert "\n" not in summary


class Writer:
    """As a SummaryWriter."""

    def __init__(self):
        self.scalars, self.histograms = {}, {}

    def add_scalar(self, tag, value, step):
        self.scalars.setdefault(tag, {})[step] = value

    def add_histogram(self, tag, values, step):
        self.histograms.setdefault(tag, {})[step] = values


def test_tensorboard_gets_every_step_once():
    model, writer = Vectors(w=(60, 70), v=(50, 60)), Writer()
    optimizer, compression = distributed(model, "cat:cost=time,latency=1e-5,bandwidth=1e8")
    board, expected = TensorBoardStats(writer, compression), []
    board.write()
    assert writer.scalars == {}
    for number in range(3):
        optimizer.zero_grad()
        model.backward(w=random(60, 70, step=number), v=random(50, 60, step=number))
        optimizer.step()
        board.write()
        board.write(step=17)  # there is nothing new
        expected.append(compression.stats.step)
    for name in ("ratio", "bytes_sent", "bytes_dense", "payload_bytes", "residual_norm", "selected", "improvement", "wait_s"):
        assert writer.scalars[f"hvd_compress/{name}"] == {i + 1: getattr(step, name) for i, step in enumerate(expected)}
    assert "hvd_compress/network/latency" not in writer.scalars
    of_third = writer.histograms["hvd_compress/parameters/residual_norm"][3]
    assert sorted(of_third) == sorted(expected[2].parameters[name].residual_norm for name in ("v", "w"))


def test_tensorboards_own_writer_takes_it(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="needs the package tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = convnet()
    optimizer, compression = distributed(model, "adacomp")
    with tensorboard.SummaryWriter(tmp_path) as writer:
        board = TensorBoardStats(writer, compression, tag="sent")
        for _ in range(2):
            train(model, optimizer, 1)
            board.write()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("sent/ratio")] == [1, 2]
    assert events.Scalars("sent/ratio")[1].value == pytest.approx(compression.stats.step.ratio)
    assert events.Histograms("sent/parameters/ratio")[-1].histogram_value.num == 3


def test_a_compression_without_stats_is_refused():
    with pytest.raises(ValueError, match="has no stats"):
        TensorBoardStats(Writer(), hvd.Compression.fp16)


def test_the_timeline_names_parameters(tmp_path):
    model, path = convnet(), tmp_path / "timeline.json"
    optimizer, compression = distributed(model, "adacomp", bucket_bytes=20_000, name="mine")
    hvd.start_timeline(str(path))
    train(model, optimizer, 3)
    hvd.barrier()
    hvd.stop_timeline()
    expected = {f"mine.{line.split()[3]}" for line in compression.report().splitlines() if " bucket." in line}
    assert "mine.bucket.1:4.weight" in expected
    if hvd.rank() == 0:
        for _ in range(100):  # it is written by a thread
            text = path.read_text() if path.exists() else ""
            names = re.findall(r'"name": "\w+\.(mine\.[^"]*)"', text)
            if expected <= {name.removesuffix(".late").removesuffix(".mean").removesuffix(".late") for name in names}:
                break
            time.sleep(0.05)
        else:
            pytest.fail(f"{expected} are not all in {sorted(names)}")
    hvd.barrier()
