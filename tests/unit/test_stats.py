"""The figures: sums over parameters and over steps."""

import math

import pytest

from hvd_compress.stats import Counters, Record, Stats, size_text


def counters(scale, selected=None):
    return Counters(
        bytes_dense=100 * scale,
        bytes_sent=10 * scale,
        selected=selected,
        encode_s=0.1 * scale,
        wait_s=0.2 * scale,
        decode_s=0.3 * scale,
        residual_sq=4 * scale,
    )


def finish(stats, **parameters):
    step = Record()
    for name, values in parameters.items():
        step.of(name).add(values, later=False)
    stats.finish(step)


def figures(c):
    return [c.bytes_dense, c.bytes_sent, c.selected, c.encode_s, c.wait_s, c.decode_s, c.residual_sq]


def test_counters_begin_at_nothing():
    assert figures(Counters()) == [0, 0, None, 0, 0, 0, 0]
    assert Counters().ratio == 1
    assert Counters().residual_norm == 0


def test_ratio_and_norm():
    assert Counters(bytes_dense=100, bytes_sent=8).ratio == 12.5
    assert Counters(bytes_dense=100, bytes_sent=0).ratio == 1
    assert Counters(residual_sq=9.0).residual_norm == 3


@pytest.mark.parametrize(("mine", "its", "both"), [(None, None, None), (3, None, 3), (None, 4, 4), (3, 4, 7), (None, 0, 0)])
def test_selected_is_none_where_no_codec_chooses(mine, its, both):
    total = Counters(selected=mine)
    total.add(Counters(selected=its), later=False)
    assert total.selected == both


def test_add_over_parameters_and_over_steps():
    for later, residual_sq in ((False, 12), (True, 8)):
        total = counters(1, selected=5)
        total.add(counters(2, selected=6), later=later)
        assert figures(total) == pytest.approx([300, 30, 11, 0.3, 0.6, 0.9, residual_sq])


def test_of_makes_a_parameter_once():
    record = Record()
    assert record.of("a") is record.of("a")
    assert list(record.parameters) == ["a"]
    assert record.of("b") is not record.of("a")


def test_one_step():
    stats = Stats()
    assert stats.steps == 0
    finish(stats, a=counters(1, selected=7), b=counters(2))
    assert stats.steps == 1
    for record in (stats.step, stats.total):
        assert figures(record) == pytest.approx([300, 30, 7, 0.3, 0.6, 0.9, 12])
        assert record.ratio == pytest.approx(10)
        assert record.residual_norm == pytest.approx(math.sqrt(12))
        assert figures(record.parameters["a"]) == figures(counters(1, selected=7))
        assert figures(record.parameters["b"]) == figures(counters(2))


def test_several_steps():
    stats = Stats()
    finish(stats, a=counters(1, selected=7), b=counters(2))
    finish(stats, a=counters(3, selected=1), b=counters(5))
    assert stats.steps == 2
    assert figures(stats.step) == pytest.approx([800, 80, 1, 0.8, 1.6, 2.4, 32])
    # The residual is that of the last step, all else is summed.
    assert figures(stats.total) == pytest.approx([1100, 110, 8, 1.1, 2.2, 3.3, 32])
    assert figures(stats.total.parameters["a"]) == pytest.approx([400, 40, 8, 0.4, 0.8, 1.2, 12])
    assert figures(stats.total.parameters["b"]) == pytest.approx([700, 70, None, 0.7, 1.4, 2.1, 20])


def test_a_parameter_that_comes_later_or_is_left_out():
    stats = Stats()
    finish(stats, a=counters(1))
    finish(stats, b=counters(2))
    finish(stats)
    assert stats.steps == 3
    assert figures(stats.step) == [0, 0, None, 0, 0, 0, 0]
    assert set(stats.total.parameters) == {"a", "b"}
    assert stats.total.bytes_dense == 300


def test_totals_do_not_share_counters_with_a_step():
    stats = Stats()
    finish(stats, a=counters(1))
    finish(stats, a=counters(1))
    assert stats.step.parameters["a"].bytes_dense == 100
    assert stats.total.parameters["a"].bytes_dense == 200


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1234567, "1.23 MB"),
        (5e9, "5.00 GB"),
        (2e12, "2.00 TB"),
        (3e15, "3000.00 TB"),
    ],
)
def test_bytes_in_words(count, text):
    assert size_text(count) == text


def test_a_step_in_one_line():
    stats = Stats()
    finish(stats, a=counters(100))
    assert stats.summary() == "10.0x fewer bytes, 1.00 kB sent, encode 10000.0 ms, wait 20000.0 ms, decode 30000.0 ms"
