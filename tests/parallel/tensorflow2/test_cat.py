"""CAT: one choice for all that travels together, and what sending costs, measured alike on every rank."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import Compression, Vectors, assert_equal_on_all_ranks, gather, random

COSTLY = "cost=time,latency=1e-5,bandwidth=1e8"


@pytest.mark.parametrize("how", ["eager", "function"])
@pytest.mark.parametrize("scope", ["bucket", "model"])
def test_one_choice_for_all_that_travel_together(scope, how):
    """A threshold for both selects next to nothing of the small ones; one of their own would select as many."""
    selected = {}
    for bucket_bytes in (12_000, 24_000):  # room for one of them, or for both
        vectors = Vectors(large=(50, 60), small=(50, 60))
        compression = Compression.from_spec(f"cat:error_feedback=false,{COSTLY},scope={scope}", bucket_bytes=bucket_bytes)
        step = lambda a, b: vectors.gradients(compression, a, b)  # noqa: B023, E731
        step = tf.function(step) if how == "function" else step
        step(tf.constant(random(50, 60)), tf.constant(0.01 * random(50, 60, step=1)))
        counters = list(compression.stats.step.parameters.values())
        selected[bucket_bytes] = [each.selected for each in counters]
        assert len(compression.plans[0].buckets) == (2 if scope == "bucket" and bucket_bytes == 12_000 else 1)
    assert selected[24_000][0] > 10 * (selected[24_000][1] + 1)
    if scope == "bucket":
        assert selected[12_000][0] == pytest.approx(selected[12_000][1], rel=0.2)
    else:
        assert selected[12_000] == selected[24_000]


@pytest.mark.gloo
@pytest.mark.parametrize("spec", ["cat", "cat:scheme=topk+sign,scope=model", "qsgd:bits=auto"])
def test_all_ranks_measure_the_same_network(spec):
    vectors, compression = Vectors(a=(100, 200), b=(30, 40)), Compression.from_spec(spec, bucket_bytes=40_000)
    step = tf.function(lambda a, b: vectors.gradients(compression, a, b))
    selected = []
    for number in range(20):
        assert_equal_on_all_ranks(step(tf.constant(random(100, 200, step=number)), tf.constant(random(30, 40, step=number))))
        selected.append(compression.stats.step.selected)
        if number == 0:
            assert compression.stats.network is None
    if spec.startswith("cat"):
        scopes = [21_200] if "scope=model" in spec else [20_000, 1200]
        explored = [sum(max(1, round(part * n)) for n in scopes) for part in (0.01, 0.001, 0.1, 0.0001)]
        assert selected[:4] == explored
    network = compression.stats.network
    assert gather(network) == [network] * len(gather(network))
    assert 1e-6 <= network.latency < 10
    assert network.bandwidth > 1e3


def test_stats_tell_the_choice():
    vectors, compression = Vectors(w=(60, 70)), Compression.from_spec(f"cat:error_feedback=false,{COSTLY}")
    total = 0
    for number in range(3):
        grad = random(60, 70, step=number)
        vectors.gradients(compression, tf.constant(grad))
        counters = compression.stats.step
        largest = np.sort(np.abs(grad).ravel())[::-1][: counters.selected]
        assert counters.energy == pytest.approx(np.square(grad).sum(dtype=float), rel=1e-5)
        assert counters.improvement == pytest.approx(np.square(largest).sum(dtype=float) / counters.energy, rel=1e-4)
        assert counters.improvement_per_bit == pytest.approx(counters.improvement / (8 * counters.payload_bytes))
        total += counters.payload_bytes
    assert compression.stats.total.payload_bytes == total
