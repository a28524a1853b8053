"""APMSqueeze: against the oracle, step by step, and every trap."""

import warnings

import helpers
import horovod.torch as hvd
import numpy as np
import pytest
import torch
from helpers import Vectors, assert_equal_on_all_ranks, batch, convnet, gather, loss_of, random
from reference.apmsqueeze import Ranks

from hvd_compress import apmsqueeze
from hvd_compress.torch import APMSqueeze

BETAS, EPS = (0.9, 0.99), 1e-8
BOUND = 2.345208
"""(1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2))"""
SHAPES = {"one": (1,), "none": (0,), "three": (3,), "odd": (7, 11), "large": (40, 50)}


def squeezed(model, optimizer_options=None, **options):
    """An APMSqueeze on Horovod, of which everything is compressed, and its compression."""
    options = {"lr": 0.01, "betas": BETAS, "eps": EPS, "freeze_step": 3, "overrides": {"*": "onebit:scale=l2"}, **options}
    optimizer = APMSqueeze(model.named_parameters(), exchange=helpers.EXCHANGE, **options)
    compression = optimizer.compression
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression, **(optimizer_options or {})
    )
    return optimizer, compression


def start(model):
    """The same on every rank, and nowhere zero."""
    for i, p in enumerate(model.parameters()):
        p.data = random(*p.shape, step=100 + i, rank=0)


def gradient(*shape, step, rank=None):
    """Random numbers that add up exactly: on more than two ranks, the order in which Horovod adds is not always the same."""
    return (random(*shape, step=step, rank=rank) * 64).round() / 64


def train(model, optimizer, steps, zero=()):
    """Steps on gradients of a rank's own; `zero` are indices of "large" whose gradient is 0."""
    for step in steps:
        optimizer.zero_grad()
        grads = {name: gradient(*p.shape, step=step) for name, p in model.named_parameters()}
        if zero:
            grads["large"].view(-1)[list(zero)] = 0
        model.backward(**grads)
        optimizer.step()
        assert_equal_on_all_ranks(model.parameters())


def everything(model, optimizer, compression):
    state = compression.state_dict()
    tensors = dict(model.state_dict())
    tensors |= {f"{name}.d": t for name, t in state["residuals"].items()}
    tensors |= {f"{name}.D": t for name, (_, t) in state["piece_residuals"].items()}
    for i, p in enumerate(model.parameters()):
        tensors |= {f"{i}.{name}": t for name, t in optimizer.state[p].items()}
    return {name: t.clone() for name, t in tensors.items()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


# --- the oracle


@pytest.mark.gloo
@pytest.mark.parametrize("scale", ["l2", "l1"])
def test_step_by_step_it_is_the_oracles(scale, ranks, exchange):
    model = Vectors(**SHAPES)
    start(model)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer, compression = squeezed(model, codec=scale, overrides={"*": f"onebit:scale={scale}"}, weight_decay=0.1)
    seen, momenta = [], []
    for step in range(12):
        train(model, optimizer, [step])
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
        momenta.append({name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()})
    state = compression.state_dict()
    residuals = gather({name: r.numpy() for name, r in state["residuals"].items()})
    pieces = gather({name: (begin, r.numpy()) for name, (begin, r) in state["piece_residuals"].items()})
    assert any(pieces) == (exchange == "scatter-gather")
    for name, shape in SHAPES.items():
        owners = [p[name] for p in pieces if name in p]
        places = [(begin, begin + piece.size) for begin, piece in owners]
        if exchange == "scatter-gather":  # they make up the whole of it
            assert sum(end - begin for begin, end in places) == np.prod(shape)
        oracle = Ranks(
            first[name].flatten().numpy(),
            ranks,
            places if exchange == "scatter-gather" else None,
            lr=0.01,
            beta1=BETAS[0],
            beta2=BETAS[1],
            eps=EPS,
            weight_decay=0.1,
            freeze_step=3,
            scale=scale,
        )
        for step in range(12):
            oracle.step([gradient(*shape, step=step, rank=rank).flatten() for rank in range(ranks)])
            np.testing.assert_allclose(momenta[step][name].flatten(), oracle.m, atol=2e-6, err_msg=f"m of {name}, step {step}")
            np.testing.assert_allclose(seen[step][name].flatten(), oracle.x, atol=2e-5, err_msg=f"{name}, step {step}")
        for rank in range(ranks):
            np.testing.assert_allclose(residuals[rank][name].flatten(), oracle.worker[rank], atol=1e-5)
        for begin, piece in owners:
            np.testing.assert_allclose(piece, oracle.server[begin : begin + piece.size], atol=1e-5)


def test_momenta_telescope(ranks):
    """Sum of m_t = sum of the mean of m_i,t - (mean of d_i + D)."""
    model = Vectors(**SHAPES)
    start(model)
    optimizer, compression = squeezed(model, freeze_step=1)
    train(model, optimizer, [0])
    beta1 = BETAS[0]
    sent = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    wanted = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(1, 30):
        for name, p in model.named_parameters():
            wanted[name] += beta1 * optimizer.state[p]["exp_avg"]
            wanted[name] += (1 - beta1) * sum(gradient(*p.shape, step=step, rank=rank) for rank in range(ranks)) / ranks
        train(model, optimizer, [step])
        for name, p in model.named_parameters():
            sent[name] += optimizer.state[p]["exp_avg"]
    states = gather(compression.state_dict())
    for name in SHAPES:
        left = sum(state["residuals"][name] for state in states) / ranks
        for state in states:
            begin, piece = state["piece_residuals"].get(name, (0, torch.zeros(0)))
            left.view(-1)[begin : begin + piece.numel()] += piece
        torch.testing.assert_close(sent[name], wanted[name] - left, rtol=0, atol=1e-4)


# --- traps


def test_the_second_moment_is_bitwise_constant_after_the_switch():
    model = Vectors(**SHAPES)
    optimizer, _ = squeezed(model)
    before = None
    for step in range(8):
        train(model, optimizer, [step])
        now = [optimizer.state[p]["exp_avg_sq"].clone() for p in model.parameters()]
        if before is not None:
            assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True)) == (step >= 3)
        before = now


def test_what_had_no_gradient_does_not_move():
    model = Vectors(**SHAPES)
    start(model)
    optimizer, _ = squeezed(model)
    untouched = model.large.detach().clone().view(-1)[[5, 6, 1000]]
    train(model, optimizer, range(3), zero=(5, 6, 1000))
    train(model, optimizer, range(3, 9))
    assert torch.equal(model.large.detach().view(-1)[[5, 6, 1000]], untouched)
    assert model.large.detach().abs().max() < 10


def test_what_had_a_small_gradient_moves_no_further_than_adam_can():
    model = Vectors(large=(40, 50))
    optimizer, _ = squeezed(model, lr=0.01)
    for step in range(10):
        before = model.large.detach().clone()
        optimizer.zero_grad()
        grad = gradient(40, 50, step=step)
        grad[3] *= 1e-6 if step < 3 else 1
        model.backward(large=grad)
        optimizer.step()
        assert (model.large.detach() - before).abs().max() <= 0.01 * BOUND * (1 + 1e-5)
    assert (model.large.detach()[3] - before[3]).abs().max() > 0


def test_weight_decay_goes_on_after_the_switch():
    model = Vectors(large=(40, 50))
    start(model)
    optimizer, _ = squeezed(model, weight_decay=0.5, lr=0.1)
    train(model, optimizer, range(3), zero=range(2000))
    before = model.large.detach().clone()
    train(model, optimizer, range(3, 5), zero=range(2000))  # V is 0: nothing else acts
    torch.testing.assert_close(model.large.detach(), before * (1 - 0.1 * 0.5) ** 2)


def test_every_step_counts():
    """The first one, and that after the switch, move the parameters."""
    model = Vectors(large=(40, 50))
    optimizer, _ = squeezed(model, freeze_step=1)
    for step in range(3):
        before = model.large.detach().clone()
        train(model, optimizer, [step])
        assert (model.large.detach() != before).float().mean() > 0.99


def test_all_switch_at_once_and_stats_say_so(exchange):
    model = Vectors(large=(40, 50))
    optimizer, compression = squeezed(model, freeze_step=0.5, total_steps=6)
    ways = []
    for step in range(6):
        train(model, optimizer, [step])
        ways.append(compression.stats.step.exchanges)
    assert ways == [{"allreduce"}] * 3 + [{exchange}] * 3
    assert compression.stats.step.ratio > 5


def test_auto_waits_for_the_last_rank(monkeypatch, ranks):
    """Ranks whose second moments look different to them switch when it is time for all."""
    model = Vectors(large=(40, 50))
    optimizer, compression = squeezed(model, freeze_step="auto", betas=(0.9, 0.9))
    asked = []

    def is_stable(now, before):
        asked.append((now, before))
        return len(asked) >= 4 + hvd.rank()

    monkeypatch.setattr(apmsqueeze, "is_stable", is_stable)
    for step in range(20):
        train(model, optimizer, [step])
    assert len(asked) == 3 + ranks
    assert asked[0][1] < asked[1][1] < asked[0][0]  # the first norm, the second, and that of one horizon later
    assert gather(optimizer.param_groups[0]["frozen"]) == [True] * ranks
    assert compression.stats.step.exchanges != {"allreduce"}


def test_auto():
    """With gradients of one distribution: when the norm is near its limit."""
    model = Vectors(large=(40, 50))
    optimizer, _ = squeezed(model, freeze_step="auto", betas=(0.9, 0.9))
    frozen = []
    for step in range(60):
        train(model, optimizer, [step])
        frozen.append(optimizer.param_groups[0]["frozen"])
    assert frozen[-1]
    assert 25 < frozen.index(True) < 50


# --- with the rest of PyTorch and Horovod


def test_amp():
    """The scale, which grows, is not in the result."""

    def run(steps, scaled):
        model = Vectors(**SHAPES)
        start(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3, enabled=scaled)
        optimizer, compression = squeezed(model, grad_scaler=scaler)
        for step in steps:
            optimizer.zero_grad()
            grads = {name: gradient(*p.shape, step=step) for name, p in model.named_parameters()}
            scaler.scale(sum((p * grads[name]).sum() for name, p in model.named_parameters())).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        return everything(model, optimizer, compression)

    plain, scaled = run(range(8), False), run(range(8), True)
    for name in SHAPES:
        torch.testing.assert_close(plain[name], scaled[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad_step", [1, 5], ids=["dense", "compressed"])
def test_a_step_with_an_overflow_on_one_rank_is_skipped_on_all(bad_step):
    def run(bad):
        model = Vectors(**SHAPES)
        start(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        optimizer, compression = squeezed(model, grad_scaler=scaler)
        for step in range(8):
            for overflow in [True, False] if bad and step == bad_step else [False]:
                optimizer.zero_grad()
                grads = {name: gradient(*p.shape, step=step) for name, p in model.named_parameters()}
                if overflow and hvd.rank() == 1:
                    grads["odd"][2, 2] = float("inf")
                scaler.scale(sum((p * grads[name]).sum() for name, p in model.named_parameters())).backward()
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update()
                assert_equal_on_all_ranks(model.parameters())
        assert scaler.get_scale() == (32.0 if bad else 64.0)
        assert optimizer.param_groups[0]["step"] == 8
        return everything(model, optimizer, compression)

    skipped, plain = run(True), run(False)
    for name in SHAPES:  # units of the loss scale differ by 2, which is exact
        torch.testing.assert_close(skipped[name], plain[name], rtol=1e-6, atol=1e-7)


def test_a_resumed_run_is_the_run_that_never_stopped():
    def begin():
        model = Vectors(**SHAPES)
        start(model)
        return model, *squeezed(model)

    for saved_at in (2, 6):
        model, optimizer, compression = begin()
        train(model, optimizer, range(saved_at))
        states = [part.state_dict() for part in (model, optimizer, compression)]
        states = [torch.load(_saved(state), weights_only=True) for state in states]
        train(model, optimizer, range(saved_at, 9))
        resumed = begin()
        for part, state in zip(resumed, states, strict=True):
            part.load_state_dict(state)
        train(*resumed[:2], range(saved_at, 9))
        assert_same(everything(*resumed), everything(model, optimizer, compression))


def _saved(state):
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_another_number_of_ranks_restarts_the_errors_and_says_so():
    model = Vectors(**SHAPES)
    optimizer, compression = squeezed(model)
    train(model, optimizer, range(6))
    state = {**compression.state_dict(), "world_size": 77}
    with pytest.warns(UserWarning, match="its world size is 77.*The residuals restart at zero"):
        compression.load_state_dict(state, strict=False)
    assert not compression.state_dict()["residuals"]
    train(model, optimizer, range(6, 8))


def test_broadcasts_bring_all_ranks_to_one_state():
    """Also of an optimizer that has not made a step: Horovod does no step on zeros then."""
    for steps in (0, 2, 5):
        model = Vectors(**SHAPES)
        optimizer, _ = squeezed(model)
        train(model, optimizer, range(steps))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(hvd.rank())
        if hvd.rank() != 0:
            optimizer.param_groups[0].update(step=77, lr=9.0)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert optimizer.param_groups[0]["step"] == steps
        assert optimizer.param_groups[0]["lr"] == 0.01
        train(model, optimizer, range(steps, steps + 2))


def test_a_group_that_is_not_frozen_stays_adams(ranks):
    model = Vectors(large=(40, 50), embedding=(30, 40))
    groups = [
        {"params": [("large", model.large)]},
        {"params": [("embedding", model.embedding)], "freeze": False},
    ]
    optimizer = APMSqueeze(groups, lr=0.01, betas=BETAS, freeze_step=2, exchange=helpers.EXCHANGE)
    compression = optimizer.compression
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    oracle = Ranks(np.zeros(1200), ranks, None, 0.01, *BETAS, 1e-8, 0, freeze_step=100)
    for step in range(6):
        train(model, optimizer, [step])
        oracle.step([gradient(30, 40, step=step, rank=rank).flatten() for rank in range(ranks)])
        np.testing.assert_allclose(model.embedding.detach().flatten(), oracle.x, atol=1e-5)
    assert compression.stats.step.of("embedding").exchanges == {"allreduce"}
    assert compression.stats.step.of("large").exchanges != {"allreduce"}


def test_small_parameters_keep_their_exact_momentum(ranks):
    model = Vectors(large=(40, 50), bias=(50,))
    optimizer, compression = squeezed(model, overrides=None)
    x = np.zeros(50)
    m, v = np.zeros(50), np.zeros(50)
    for step in range(8):
        train(model, optimizer, [step])
        g = sum(gradient(50, step=step, rank=rank).numpy().astype(np.float64) for rank in range(ranks)) / ranks
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g**2 if step < 3 else v
        x -= 0.01 * np.clip(m / (np.sqrt(v) + EPS), -BOUND, BOUND)
        np.testing.assert_allclose(model.bias.detach(), x, atol=1e-5)
    assert compression.stats.step.of("bias").exchanges == {"allreduce"}


def test_the_sum_of_gradients_trains_as_their_mean():
    """Adam's step does not depend on the gradients' size, and the compressed stage keeps that."""
    results = []
    for op in (hvd.Average, hvd.Sum):
        model = Vectors(**SHAPES)
        start(model)
        optimizer, _ = squeezed(model, {"op": op}, eps=1e-12)
        train(model, optimizer, range(8))
        results.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_passes_clipping_and_schedulers_on_a_real_model():
    model = convnet()
    optimizer = APMSqueeze(model.named_parameters(), lr=3e-3, betas=BETAS, freeze_step=10, exchange=helpers.EXCHANGE)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=optimizer.compression,
        backward_passes_per_step=2,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(60):
            optimizer.zero_grad()
            for half in range(2):
                x, y = batch(2 * (step % 2) + half)
                loss = torch.nn.functional.cross_entropy(model(x), y) / 2
                loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            with optimizer.skip_synchronize():
                optimizer.step()
            scheduler.step()
            losses.append(2 * loss.item())
            assert_equal_on_all_ranks(model.parameters())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize(
    "spec", ["adacomp:bin=50", "onebit:scale=l1", "qsgd:bits=8,error_feedback=true", "cat:cost=packets", "topk", "bf16", "none"]
)
def test_any_codec(spec):
    model = convnet()
    optimizer, compression = squeezed(model, codec=spec, overrides=None, freeze_step=10, lr=3e-3)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    losses = []
    for step in range(40):
        optimizer.zero_grad()
        loss = loss_of(model, step % 2)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert_equal_on_all_ranks(model.parameters())
    assert losses[-1] < 0.6 * losses[0]
    assert str(compression) == str(compression.plan.policy.codec)


def test_half_precision_parameters():
    for dtype in (torch.bfloat16, torch.float64):
        model = convnet(dtype)
        optimizer, _ = squeezed(model, overrides=None, freeze_step=2)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, step, dtype).backward()
            optimizer.step()
            assert_equal_on_all_ranks(model.parameters())
        state = optimizer.state_dict()
        m = optimizer.state[model[0].weight]["exp_avg"]
        assert m.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        kept = m.clone()
        optimizer.load_state_dict(state)
        assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], kept)


def test_its_compression_with_another_optimizer_is_refused():
    model = Vectors(large=(40, 50))
    mine = APMSqueeze(model.named_parameters())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), compression=mine.compression
    )
    with pytest.raises(RuntimeError, match="this compression is of an APMSqueeze: hand both"):
        model.backward(large=random(40, 50))
    optimizer._handles.clear()


def test_codecs_without_a_residual_are_refused():
    model = Vectors(large=(40, 50))
    with pytest.raises(ValueError, match=r"qsgd:bits=4,bucket=512 keeps no residual.*; with error_feedback=true it does"):
        _ = APMSqueeze(model.named_parameters(), codec="qsgd:bits=4").compression
    compression = APMSqueeze(model.named_parameters()).compression
    with pytest.raises(ValueError, match="nuqsgd:bits=2,bucket=512 keeps no residual"):
        compression.set_codec("nuqsgd:bits=2")
