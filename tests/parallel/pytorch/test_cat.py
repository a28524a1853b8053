"""CAT: one choice for all that travels together, and what sending costs, measured alike on every rank."""

import time

import horovod.torch as hvd
import pytest
import torch
from helpers import Vectors, assert_equal_on_all_ranks, batch, convnet, distributed, gather, loss_of, random

COSTLY = "cost=time,latency=1e-5,bandwidth=1e8"


def large_and_small(**options):
    """Two parameters, of which one has gradients a hundred times as large."""
    model = Vectors(large=(50, 60), small=(50, 60))
    return model, *distributed(model, **options)


def step(model, optimizer, number):
    optimizer.zero_grad()
    model.backward(large=random(50, 60, step=number), small=0.01 * random(50, 60, step=100 + number))
    optimizer.step()


@pytest.mark.parametrize("scope", ["bucket", "model"])
def test_one_choice_for_all_that_travel_together(scope):
    """A threshold for both selects next to nothing of the small ones; one of their own would select as many."""
    selected = {}
    for bucket_bytes in (12_000, 24_000):  # room for one of them, or for both
        model, optimizer, compression = large_and_small(
            spec=f"cat:error_feedback=false,{COSTLY},scope={scope}", bucket_bytes=bucket_bytes
        )
        step(model, optimizer, 0)
        counters = compression.stats.step
        selected[bucket_bytes] = [counters.of("large").selected, counters.of("small").selected]
        assert len(compression.plan.buckets) == (2 if scope == "bucket" and bucket_bytes == 12_000 else 1)
    assert selected[24_000][0] > 10 * (selected[24_000][1] + 1)
    if scope == "bucket":
        assert selected[12_000][0] == pytest.approx(selected[12_000][1], rel=0.2)
    else:
        assert selected[12_000] == selected[24_000]


def test_each_rank_chooses_for_itself():
    model = Vectors(w=(100, 100))
    optimizer, compression = distributed(model, f"cat:{COSTLY}", exchange="allgather")
    few = torch.zeros(100, 100)
    few[0] = 1.0
    model.backward(w=few if hvd.rank() == 0 else random(100, 100))
    optimizer.step()
    selected = gather(compression.stats.step.selected)
    assert selected[0] == 100
    assert selected[1] != 100
    assert_equal_on_all_ranks(model.parameters())


@pytest.mark.gloo
@pytest.mark.parametrize("scheme", ["topk", "topk+sign", "stochastic"])
def test_all_ranks_measure_the_same_network(scheme):
    model = convnet()
    optimizer, compression = distributed(model, f"cat:scheme={scheme}", bucket_bytes=40_000)
    numel = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    selected = []
    for number in range(20):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()
        assert_equal_on_all_ranks(model.parameters())
        selected.append(compression.stats.step.selected / numel)
        if number == 0:
            assert compression.stats.network is None
    if scheme != "stochastic":  # of which the number sent is random
        assert selected[:4] == pytest.approx([0.01, 0.001, 0.1, 0.0002], rel=0.1)  # explored; at least one of a bucket
    network = compression.stats.network
    assert gather(network) == [network] * len(gather(network))
    assert 1e-6 <= network.latency < 10
    assert network.bandwidth > 1e3


def test_two_compressions_in_one_backward_have_a_fit():
    """When the second one is asked for its results they have come, so it cannot tell how long they took."""
    models = {name: Vectors(**{name: (200, 300)}) for name in ("first", "second")}
    pairs = {name: distributed(model, "cat") for name, model in models.items()}
    for number in range(12):
        for name, model in models.items():
            pairs[name][0].zero_grad()
            model.backward(**{name: random(200, 300, step=number)})
        for optimizer, _ in pairs.values():
            optimizer.step()
            time.sleep(0.02)  # the second's results are there
    for _, compression in pairs.values():
        network = compression.stats.network
        assert network is not None
        assert gather(network) == [network] * hvd.size()


def test_stats_tell_the_choice():
    model = Vectors(w=(60, 70))
    optimizer, compression = distributed(model, f"cat:error_feedback=false,{COSTLY}")
    total = 0
    for number in range(3):
        optimizer.zero_grad()
        grad = random(60, 70, step=number)
        model.backward(w=grad)
        optimizer.step()
        counters = compression.stats.step
        largest = grad.flatten().abs().sort(descending=True).values[: counters.selected]
        assert counters.energy == pytest.approx(float(grad.square().sum()), rel=1e-5)
        assert counters.improvement == pytest.approx(float(largest.square().sum() / grad.square().sum()), rel=1e-4)
        assert counters.improvement_per_bit == pytest.approx(counters.improvement / (8 * counters.payload_bytes))
        total += counters.payload_bytes
    assert compression.stats.total.payload_bytes == total
    assert 4 * counters.selected < counters.payload_bytes < 6 * counters.selected + 100


def test_codecs_that_do_not_choose_have_no_improvement():
    model = convnet()
    optimizer, compression = distributed(model, "adacomp")
    torch.nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    optimizer.step()
    assert compression.stats.step.improvement == compression.stats.step.improvement_per_bit == 0
    assert compression.stats.network is None
    assert compression.stats.step.payload_bytes > 0
