"""What an exchange costs, fitted to the times that it took."""

import itertools
import math

import pytest

from hvd_compress._kernels import Meter
from hvd_compress.stats import Network

SIZES = (1e3, 1e5, 1e7, 1e4)


def round_of(meter, size, seconds, exchange=0):
    """A round in which a rank sends `size` bytes; and of the last one the ranks say what it took."""
    meter.said(exchange, seconds)
    meter.sent(exchange, size)
    meter.finish_round()


def measured(took, rounds=24, sizes=SIZES, network=""):
    meter, before = Meter(network), None
    for size in itertools.islice(itertools.cycle(sizes), rounds):
        round_of(meter, size, [0.0, 0.0] if before is None else took(before))
        before = size
    return meter


def test_a_line_is_found():
    meter = measured(lambda size: [2e-3 + size / 1e8] * 3)
    assert meter.is_fitted
    assert Network.of(meter) == (pytest.approx(2e-3, rel=1e-4), pytest.approx(1e8, rel=1e-4))


def test_the_rank_that_waited_least_tells_the_time():
    meter = measured(lambda size: [0.0, 0.7, 2e-3 + size / 1e8, 0.1 + 2e-3 + size / 1e8])  # 0: not known
    assert Network.of(meter) == (pytest.approx(2e-3, rel=1e-4), pytest.approx(1e8, rel=1e-4))


def test_a_few_that_were_held_up_do_not_count():
    held_up = itertools.cycle([0, 0, 0, 0.3, 0, 0, 0])
    meter = measured(lambda size: [2e-3 + size / 1e8 + next(held_up)], rounds=60)
    assert Network.of(meter) == (pytest.approx(2e-3, rel=1e-3), pytest.approx(1e8, rel=1e-3))


def test_a_network_that_changes_is_measured_again():
    meter, before = Meter(), None
    for i, size in enumerate(itertools.islice(itertools.cycle(SIZES), 100)):
        rate = 1e8 if i < 30 else 1e6
        round_of(meter, size, [0.0] if before is None else [1e-3 + before / rate])
        before = size
    assert Network.of(meter) == (pytest.approx(1e-3, rel=1e-3), pytest.approx(1e6, rel=1e-3))


@pytest.mark.parametrize(
    "took",
    [
        lambda size: [0.0, 0.0],
        lambda size: [float("nan"), float("inf"), -1.0],
    ],
)
def test_without_times_nothing_is_fitted(took):
    meter = measured(took)
    assert not meter.is_fitted
    assert Network.of(meter) is None
    assert (meter.step().latency, meter.step().seconds_per_byte) == (1e-3, 8e-9)


def test_one_size_alone_cannot_be_fitted():
    assert not measured(lambda size: [1e-3], sizes=(1000,)).is_fitted


def test_times_that_fall_with_the_size_have_a_cost_that_is_none():
    network = Network.of(measured(lambda size: [1e-3 - size * 1e-11]))
    assert network.latency > 0
    assert network.bandwidth == math.inf


def test_the_order_within_a_round_does_not_matter():
    left, right = Meter(), Meter()
    for i, size in enumerate(SIZES * 3):
        exchanges = [(0, size), (1, size / 3), (2, 7.0)]
        for meter, order in ((left, exchanges), (right, exchanges[::-1])):
            for exchange, sent in order:
                if i > 0:
                    meter.said(exchange, [1e-3 + sent * 1e-8 * (1 + i % 3)])
                meter.sent(exchange, sent)
            meter.finish_round()
    assert left.step().latency == right.step().latency
    assert left.step().seconds_per_byte == right.step().seconds_per_byte


def test_sizes_are_explored_at_first_and_now_and_then():
    meter = Meter()
    explored = []
    for i in range(2100):
        if meter.step().explore > 0:
            explored.append((i, meter.step().explore))
        round_of(meter, 10, [])
    assert [i for i, _ in explored] == [*range(8), *range(1000, 1004), *range(2000, 2004)]
    assert [fraction for _, fraction in explored] == [0.01, 0.001, 0.1, 0.0001] * 4


def test_who_cannot_measure_takes_the_fit_of_another():
    fitted = measured(lambda size: [2e-3 + size / 1e8], network="here")
    others = [Meter(network) for network in ("here", "elsewhere", "")]
    for rounds in range(1, 10):
        for meter in others:
            round_of(meter, 1e4, [0.0])
        assert [Network.of(meter) for meter in others] == [Network.of(fitted) if rounds >= 8 else None, None, None]
    measured(lambda size: [4e-3 + size / 1e7], network="here")
    round_of(others[0], 1e4, [0.0])
    assert Network.of(others[0]) == (pytest.approx(4e-3, rel=1e-4), pytest.approx(1e7, rel=1e-4))
    assert Network.of(fitted) == (pytest.approx(2e-3, rel=1e-4), pytest.approx(1e8, rel=1e-4))
