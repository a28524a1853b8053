"""Gradients that are not finite, and a loss scale that changes."""

import horovod.torch as hvd
import pytest
import torch
from helpers import Vectors, assert_equal_on_all_ranks, distributed, random
from parallel.common import WITH_RESIDUAL

INF = float("inf")


def setup(spec, scale=2.0**10, **options):
    model = Vectors(w=(40, 40), v=(50, 50), b=(20,))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10_000)
    optimizer, compression = distributed(model, spec, grad_scaler=scaler, **options)
    return model, scaler, optimizer, compression


def scaled_step(model, scaler, optimizer, step, bad=None):
    optimizer.zero_grad()
    grads = {name: random(*p.shape, step=step) for name, p in model.named_parameters()}
    if bad is not None and hvd.rank() == 1:
        name, value = bad
        grads[name].view(-1)[7] = value
    scaler.scale(sum((getattr(model, name) * g).sum() for name, g in grads.items())).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    assert_equal_on_all_ranks(model.parameters())


@pytest.mark.parametrize("spec", [*WITH_RESIDUAL, "nuqsgd:bits=4", "nuqsgd:bits=4,coding=elias", "bf16"])
@pytest.mark.parametrize("bad", [("w", INF), ("v", float("nan")), ("b", -INF)])
def test_inf_on_one_rank_skips_the_step_everywhere_and_leaves_no_trace(spec, bad):
    model, scaler, optimizer, compression = setup(spec)
    for step in range(3):
        scaled_step(model, scaler, optimizer, step)
    before = [p.detach().clone() for p in model.parameters()]
    residuals = compression.state_dict()["residuals"]

    scaled_step(model, scaler, optimizer, 3, bad)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for name, residual in compression.state_dict()["residuals"].items():
        assert torch.equal(residual, residuals[name])
    assert scaler.get_scale() == 2.0**9

    scaled_step(model, scaler, optimizer, 4)
    assert not torch.equal(before[0], next(model.parameters()))
    assert scaler.get_scale() == 2.0**9


def test_residuals_follow_the_scale():
    """All factors are powers of 2, so a run whose scale changes is bitwise the run whose scale does not."""
    runs = []
    for change in (False, True):
        model, scaler, optimizer, compression = setup("adacomp")
        for step in range(6):
            if change and step == 3:
                scaler.update(2.0**13)
            scaled_step(model, scaler, optimizer, step)
        runs.append([p.detach().clone() for p in model.parameters()])
        factor = 2.0**3 if change else 1.0
        runs[-1] += [r / factor for r in compression.state_dict()["residuals"].values()]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("spec", [*WITH_RESIDUAL, "qsgd:bits=4"])
def test_without_a_scaler_every_rank_sees_that_it_is_not_finite(spec):
    model = Vectors(w=(40, 40), v=(50, 50))
    optimizer, compression = distributed(model, spec)
    model.backward(w=random(40, 40), v=random(50, 50))
    optimizer.step()
    residuals = compression.state_dict()["residuals"]
    optimizer.zero_grad()
    grad = random(40, 40)
    if hvd.rank() == 0:
        grad[3, 4] = INF
    model.backward(w=grad, v=random(50, 50))
    optimizer.synchronize()
    assert not torch.isfinite(model.w.grad).all()
    assert torch.isfinite(model.v.grad).all()
    for name, residual in compression.state_dict()["residuals"].items():
        assert torch.equal(residual, residuals[name])


def test_fused_optimizer_that_skips_by_itself():
    model = Vectors(w=(40, 40), b=(20,))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    from hvd_compress.torch import Compression

    compression = Compression.adacomp(model.named_parameters(), grad_scaler=scaler)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    for step in range(3):
        scaled_step(model, scaler, optimizer, step)
    before = compression.state_dict()["residuals"]["w"]
    scaled_step(model, scaler, optimizer, 3, ("b", INF))
    assert torch.equal(compression.state_dict()["residuals"]["w"], before)


def unscaled(state):
    return {name: residual / state["scales"][name] for name, residual in state["residuals"].items()}


@pytest.mark.parametrize("bad", [("w", INF), ("b", INF)])
@pytest.mark.parametrize("resumed", [False, True])
def test_first_step_of_a_process_may_be_skipped(bad, resumed):
    model, scaler, optimizer, compression = setup("adacomp")
    before = {}
    if resumed:
        for step in range(3):
            scaled_step(model, scaler, optimizer, step)
        saved = compression.state_dict()
        before = unscaled(saved)
        model, scaler, optimizer, compression = setup("adacomp")
        compression.load_state_dict(saved)
    for step in range(2):
        scaled_step(model, scaler, optimizer, step, bad)
    for name, residual in unscaled(compression.state_dict()).items():
        assert torch.equal(residual, before.get(name, torch.zeros_like(residual)))


def test_residual_norm_after_a_skipped_step():
    model, scaler, optimizer, compression = setup("adacomp")
    scaled_step(model, scaler, optimizer, 0)
    scaled_step(model, scaler, optimizer, 1, ("w", float("nan")))
    for name, residual in compression.state_dict()["residuals"].items():
        assert compression.stats.step.of(name).residual_norm == pytest.approx(residual.norm().item(), rel=1e-4)


def test_state_under_a_loss_scale_goes_on_without_one():
    """All factors are powers of 2, so it is bitwise the run that never had one."""

    def plain_step(model, optimizer, step):
        optimizer.zero_grad()
        model.backward(**{name: random(*p.shape, step=step) for name, p in model.named_parameters()})
        optimizer.step()

    runs = []
    for scale in (1.0, 2.0**10):
        model, scaler, optimizer, compression = setup("adacomp", scale)
        for step in range(3):
            scaled_step(model, scaler, optimizer, step)
        again = Vectors(w=(40, 40), v=(50, 50), b=(20,))
        again.load_state_dict(model.state_dict())
        optimizer, resumed = distributed(again, "adacomp")
        resumed.load_state_dict(compression.state_dict())
        plain_step(again, optimizer, 3)
        runs.append([p.detach() for p in again.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("change", ["unscale", "clip"])
def test_gradient_that_is_changed_before_synchronize(change):
    model, scaler, optimizer, _ = setup("adacomp")
    scaler.scale(sum((p * random(*p.shape)).sum() for p in model.parameters())).backward()
    if change == "unscale":
        scaler.unscale_(optimizer)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match=r"was changed between backward and synchronize\(\), which would be lost"):
        optimizer.synchronize()
