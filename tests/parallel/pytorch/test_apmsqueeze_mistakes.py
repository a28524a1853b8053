"""What users of APMSqueeze may get wrong: they are told, on every rank."""

import warnings

import horovod.torch as hvd
import pytest
import torch
from helpers import Vectors, gather, random

from hvd_compress.torch import APMSqueeze, Compression, MismatchError

BETAS = (0.9, 0.9)


def wrapped(optimizer, model, compression=None):
    compression = optimizer.compression if compression is None else compression
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model.backward(**{name: random(*p.shape, step=step) for name, p in model.named_parameters()})
        optimizer.step()


def model_and_optimizer(**options):
    model = Vectors(w=(40, 40), b=(40,))
    return model, APMSqueeze(model.named_parameters(), lr=0.01, **{"freeze_step": 3, "betas": BETAS, **options})


def test_a_state_that_horovod_drops_begins_anew():
    """Loaded before hvd.DistributedOptimizer: V would be 0, and frozen."""
    model, optimizer = model_and_optimizer()
    optimizer = wrapped(optimizer, model)
    train(model, optimizer, 5)
    state = optimizer.state_dict()
    model, optimizer = model_and_optimizer()
    optimizer.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"comes with 5 steps, but without its momenta.*after hvd.DistributedOptimizer"):
        optimizer = wrapped(optimizer, model)
    assert not optimizer.param_groups[0]["frozen"]
    train(model, optimizer, 5)
    assert optimizer.param_groups[0]["frozen"]
    assert model.w.detach().abs().max() > 0.01


@pytest.mark.parametrize("how", ["forgotten", "set later", "option"])
def test_a_loss_scale_that_is_not_known(how):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model, optimizer = model_and_optimizer(**({"grad_scaler": scaler} if how == "option" else {}))
    optimizer = wrapped(optimizer, model)
    if how == "set later":
        optimizer.compression.grad_scaler = scaler

    def step(number):
        optimizer.zero_grad()
        scaler.scale(sum((p * random(*p.shape, step=number)).sum() for p in model.parameters())).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()

    for number in range(3):
        step(number)
    if how != "forgotten":
        for number in range(3, 10):
            step(number)
        return
    model.zero_grad()
    torch.nn.utils.clip_grad_norm_, clip = lambda *_: None, torch.nn.utils.clip_grad_norm_
    try:
        with pytest.raises(RuntimeError, match=r"divided by 1024 between synchronize\(\) and step\(\).*pass grad_scaler="):
            step(3)
    finally:
        torch.nn.utils.clip_grad_norm_ = clip


def test_a_grad_scaler_that_is_none_is_refused():
    _, optimizer = model_and_optimizer()
    with pytest.raises(ValueError, match="grad_scaler=5 is not allowed"):
        optimizer.compression.grad_scaler = 5


@pytest.mark.parametrize(
    ("option", "values", "text"),
    [
        ("freeze_step", (5, 7), r"freeze_step: rank 0 has \[5\], rank 1 has \[7\]"),
        ("freeze_step", ("auto", 7), r"freeze_step: rank 0 has \['auto'\], rank 1 has \[7\]"),
        ("betas", ((0.9, 0.9), (0.9, 0.99)), r"betas: rank 0 has \[\[0.9, 0.9\]\], rank 1 has \[\[0.9, 0.99\]\]"),
    ],
)
def test_ranks_that_differ_in_an_option(option, values, text):
    """They would freeze at different steps, and wait for each other."""
    model, optimizer = model_and_optimizer(**{option: values[min(hvd.rank(), 1)]})
    optimizer = wrapped(optimizer, model)
    with pytest.raises(MismatchError, match=text):
        train(model, optimizer, 1)


@pytest.mark.parametrize("given", ["none", "another's"])
def test_another_compression_than_its_own(given):
    model, optimizer = model_and_optimizer()
    compression = hvd.Compression.none if given == "none" else Compression.onebit(model.named_parameters())
    optimizer = wrapped(optimizer, model, compression)
    with pytest.warns(UserWarning, match=r"the momentum stays uncompressed.*compression=optimizer.compression"):
        train(model, optimizer, 4)


def test_a_parameter_that_comes_after_the_freeze():
    model, optimizer = model_and_optimizer()
    optimizer = wrapped(optimizer, model)
    for step in range(3):
        optimizer.zero_grad()
        model.backward(w=random(40, 40, step=step))
        optimizer.step()
    with pytest.warns(UserWarning, match=r"'b' has a gradient for the first time, after the second moment was frozen"):
        train(model, optimizer, 1, first=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 2, first=4)  # said once


def test_the_state_of_an_adam_goes_on():
    model = Vectors(w=(40, 40), b=(40,), unused=(3,))
    adam = torch.optim.Adam(model.named_parameters(), lr=0.01, betas=BETAS)
    for step in range(2):
        model.zero_grad()
        model.backward(w=random(40, 40, step=step, rank=0), b=random(40, step=step, rank=0))
        adam.step()
    optimizer = APMSqueeze(model.named_parameters(), lr=0.01, freeze_step=4, betas=BETAS)
    optimizer = wrapped(optimizer, model)
    optimizer.load_state_dict(adam.state_dict())
    assert optimizer.param_groups[0]["step"] == 2
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(optimizer.state[model.w][name], adam.state[model.w][name])
        assert not optimizer.state[model.unused][name].any()
    train(model, optimizer, 3, first=2)
    assert optimizer.param_groups[0]["frozen"]
    saved = gather(model.w.detach().numpy().tobytes())
    assert saved == [saved[0]] * len(saved)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"frezze_step": 5}, r"APMSqueeze: unknown option 'frezze_step': of the compression there are min_numel, .*exchange"),
        ({"codec": "l3"}, "no codec is named 'l3'"),
    ],
)
def test_options_are_checked_at_once(options, text):
    with pytest.raises(ValueError, match=text):
        APMSqueeze(Vectors(w=(3, 3)).named_parameters(), **options)
