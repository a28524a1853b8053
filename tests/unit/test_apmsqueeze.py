"""APMSqueeze: its options, when it freezes, and what it is with one process."""

import math

import numpy as np
import pytest

from hvd_compress import apmsqueeze

torch = pytest.importorskip("torch", reason="needs PyTorch")
hvd = pytest.importorskip("horovod.torch", reason="needs Horovod built against PyTorch")
from reference.apmsqueeze import Ranks  # noqa: E402

from hvd_compress.torch import APMSqueeze  # noqa: E402


@pytest.mark.parametrize(
    ("given", "total", "steps"), [(1, None, 1), (500, None, 500), (0.15, 1000, 150), (0.0001, 10, 1), ("auto", None, "auto")]
)
def test_freeze_step(given, total, steps):
    assert apmsqueeze.freeze_step(given, total) == steps


@pytest.mark.parametrize(
    ("given", "total", "text"),
    [
        (0, None, "freeze_step=0 is not allowed; allowed is a number of steps from 1 on, a fraction of total_steps"),
        (True, None, "freeze_step=True is not allowed"),
        (1.5, 100, "freeze_step=1.5 is not allowed"),
        ("soon", None, "freeze_step='soon' is not allowed"),
        (0.15, None, "freeze_step=0.15 is a fraction of total_steps, which was not given"),
        (5, 0, "total_steps=0 is not allowed; allowed is a whole number from 1 on"),
        (5, 1e3, "total_steps=1000.0 is not allowed"),
    ],
)
def test_freeze_steps_that_are_none(given, total, text):
    with pytest.raises(ValueError, match=text):
        apmsqueeze.freeze_step(given, total)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1}, "lr=-1 is not allowed; allowed is a number from 0 on"),
        ({"lr": math.inf}, "lr=inf is not allowed"),
        ({"eps": "x"}, "eps='x' is not allowed"),
        ({"weight_decay": math.nan}, "weight_decay=nan is not allowed"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]=1.0 is not allowed; allowed is a number from 0 to below 1"),
        ({"betas": 0.9}, "betas=0.9 is not allowed; allowed are two numbers from 0 to below 1"),
        ({"freeze": 1}, "freeze=1 is not allowed; allowed is True or False"),
        ({"freeze_step": 0.2}, "freeze_step=0.2 is a fraction of total_steps, which was not given"),
    ],
)
def test_options_that_are_not_allowed(options, text):
    with pytest.raises(ValueError, match=text):
        APMSqueeze([torch.nn.Parameter(torch.zeros(3))], **options)
    if "freeze_step" not in options:
        with pytest.raises(ValueError, match=text):
            APMSqueeze([{"params": [torch.nn.Parameter(torch.zeros(3))], **options}])


def test_the_options_of_its_compression_are_checked():
    hvd.init()
    with pytest.raises(ValueError, match="APMSqueeze: unknown option 'bitts': of the compression there are min_numel, "):
        _ = APMSqueeze([torch.nn.Parameter(torch.zeros(3))], bitts=3).compression
    with pytest.raises(ValueError, match="min_numel=-1 is not allowed"):
        _ = APMSqueeze([torch.nn.Parameter(torch.zeros(3))], min_numel=-1).compression


# --- when V may be frozen


@pytest.mark.parametrize("beta2", [0.9, 0.99, 0.999])
def test_of_gradients_that_stay_alike_it_is_stable_when_it_is_near_its_limit(beta2):
    """v_t = 1 - beta2^t: (1 - beta2^t) / (1 - beta2^(t - h)) <= 1 / 0.96 with h = 1 / (1 - beta2), solved for t."""
    interval, horizon = apmsqueeze.check_interval(beta2), apmsqueeze.horizon(beta2)
    assert interval * horizon == round(1 / (1 - beta2))
    norms, t = [0.0] * horizon, 0
    while not (t and apmsqueeze.is_stable(norms[-1], norms[-1 - horizon])):
        t += interval
        norms.append(1 - beta2**t)
    b = 1 / 0.96
    expected = math.log((b - 1) / (b * beta2 ** (-interval * horizon) - 1)) / math.log(beta2)
    assert expected <= t < expected + interval


@pytest.mark.parametrize(
    ("now", "before", "stable"),
    [
        *((1, 1, True), (0.97, 1, True), (1.03, 1, True), (0.95, 1, False), (1.05, 1, False)),
        *((math.nan, 1, False), (1, math.nan, False), (math.inf, 1, False), (0, 0, False), (1, 0, False)),
    ],
)
def test_it_is_not_stable_while_it_falls_or_rises_or_is_zero(now, before, stable):
    assert apmsqueeze.is_stable(now, before) == stable
    assert bool(apmsqueeze.is_stable(np.float64(now), np.float64(before))) == stable


# --- the bound of a step


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.99), (0.9, 0.999), (0.5, 0.9), (0.0, 0.99)])
def test_no_gradients_make_a_larger_step_than_the_largest(beta1, beta2):
    bound = apmsqueeze.largest_change(beta1, beta2)
    worst = (beta1 / beta2) ** np.arange(300)[::-1]  # proportional weights: where Cauchy and Schwarz are equal
    for gradients in (worst, *np.random.default_rng(0).standard_cauchy((50, 200))):
        m = v = 0.0
        for g in gradients:
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
            assert abs(m) <= bound * np.sqrt(v) * (1 + 1e-9)
        if gradients is worst:
            assert abs(m) == pytest.approx(bound * np.sqrt(v), rel=1e-6)


def test_betas_without_such_a_bound():
    assert apmsqueeze.largest_change(0.95, 0.9) == math.inf


# --- one process


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_one_process_is_adam_and_then_momentum_over_a_frozen_second_moment(distributed, weight_decay):
    hvd.init()
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(500))
    first, gradients = p.detach().clone(), torch.randn(9, 500)
    gradients[:, 3] = 0
    gradients[:4, 5] = 0  # V is 0 there
    optimizer = APMSqueeze([("p", p)], lr=0.01, betas=(0.9, 0.99), weight_decay=weight_decay, freeze_step=4)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, [("p", p)], compression=optimizer.compression)
    for g in gradients:
        p.grad = g.clone()
        optimizer.step()
    oracle = Ranks(first.numpy(), 1, None, 0.01, 0.9, 0.99, 1e-8, weight_decay, freeze_step=4, scale=None)
    for g in gradients:
        oracle.step([g.numpy()])
    np.testing.assert_allclose(p.detach().numpy(), oracle.x, atol=2e-6)
    assert optimizer.param_groups[0]["frozen"]


def test_before_the_freeze_it_is_adam_without_bias_correction():
    """PyTorch's Adam, whose correction is undone by its lr and eps of each step."""
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(300)) for _ in range(2))
    optimizer = APMSqueeze([ours], lr=0.01, freeze_step=100)
    adam = torch.optim.Adam([theirs], lr=0.01, betas=(0.9, 0.999))
    for step in range(1, 20):
        ours.grad = torch.randn(300)
        theirs.grad = ours.grad.clone()
        correction = math.sqrt(1 - 0.999**step)
        adam.param_groups[0].update(lr=0.01 * (1 - 0.9**step) / correction, eps=1e-8 / correction)
        optimizer.step()
        adam.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_closure_and_gradients_that_are_missing_or_sparse():
    p, unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = APMSqueeze([p, unused], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert (p < 1).all()
    assert (unused == 1).all()
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = APMSqueeze(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="APMSqueeze takes dense gradients"):
        optimizer.step()


def test_a_group_that_is_added_later_begins_with_its_own_first_stage():
    p, later = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = APMSqueeze([p], lr=0.1, freeze_step=1)
    p.grad = torch.ones(3)
    optimizer.step()
    optimizer.add_param_group({"params": [later], "freeze_step": 2})
    for _ in range(2):
        later.grad = torch.ones(3)
        assert [group["frozen"] for group in optimizer.param_groups] == [True, False]
        optimizer.step()
    assert [group["frozen"] for group in optimizer.param_groups] == [True, True]
    assert (later < 1).all()
