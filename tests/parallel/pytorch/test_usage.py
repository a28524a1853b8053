"""Everything that a user of horovod.torch's optimizer does."""

import copy
import time
import warnings

import horovod.torch as hvd
import pytest
import torch
from helpers import Vectors, assert_equal_on_all_ranks, batch, convnet, distributed, gather, loss_of, random

from hvd_compress.message import MessageWriter
from hvd_compress.torch import Compression

pytestmark = pytest.mark.filterwarnings("error:.*is not the gradient of a parameter")


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        assert_equal_on_all_ranks(model.parameters())


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def run(spec="adacomp", steps=4, memory_format=torch.contiguous_format, **options):
    model = convnet(memory_format=memory_format)
    optimizer, compression = distributed(model, spec, **options)
    train(model, optimizer, steps)
    return weights(model), compression


def test_zero_grad_to_zeros_and_to_none_train_alike():
    expected, _ = run()
    model = convnet()
    optimizer, _ = distributed(model, "adacomp")
    for step in range(4):
        model.zero_grad(set_to_none=False)
        loss_of(model, step).backward()
        optimizer.step()
    assert torch.equal(weights(model), expected)


@pytest.mark.parametrize("spec", ["adacomp", "none"])
def test_channels_last_trains_and_ranks_may_not_differ_in_layout(spec):
    _, compression = run(spec, memory_format=torch.channels_last)
    layouts = {s.parameter.layout for s in compression.plan.segments if len(s.parameter.shape) == 4}
    assert layouts != {"row-major"}


def test_gradient_of_another_layout_is_sent_in_the_parameters_order():
    """On one rank only, as where a parameter was unused: the result must be the same."""
    results = []
    for transpose in (False, True):
        model = Vectors(w=(30, 50))
        optimizer, _ = distributed(model, "adacomp")
        grad = random(30, 50)
        model.w.grad = grad.t().contiguous().t() if transpose and hvd.rank() == 0 else grad.clone()
        optimizer.synchronize()
        assert_equal_on_all_ranks([model.w.grad.contiguous()])
        results.append(model.w.grad.contiguous())
    assert torch.equal(*results)


def test_parameter_that_one_rank_does_not_use_in_some_steps():
    model = Vectors(w=(40, 40), v=(50, 50))
    optimizer, compression = distributed(model, "adacomp", bucket_bytes=7000)
    for step in range(6):
        optimizer.zero_grad()
        grads = {"w": random(40, 40, step=step), "v": random(50, 50, step=step)}
        if hvd.rank() == 1 and step % 2:
            del grads["v"]
        model.backward(**grads)
        optimizer.step()
        assert_equal_on_all_ranks(model.parameters())
    assert compression.stats.step.of("v").bytes_sent > 0


def test_parameters_without_gradient_and_frozen_ones():
    model = convnet()
    model[2].requires_grad_(False)
    frozen = copy.deepcopy(model[2].state_dict())
    optimizer, _ = distributed(model, "adacomp", bucket_bytes=20_000)
    train(model, optimizer, 3)
    assert all(torch.equal(frozen[k], v) for k, v in model[2].state_dict().items())


def assert_mean_of_bfloat16(result, grads, exchange):
    """A mean of the rounded gradients; in scatter-gather it is rounded itself, to 8 bits of significand."""
    mean = sum(g.bfloat16().float() for g in grads) / len(grads)
    torch.testing.assert_close(result, mean, **({} if exchange == "allgather" else {"rtol": 2**-8, "atol": 1e-7}))


def test_backward_passes_per_step_sends_the_sum_once(exchange):
    model = Vectors(w=(40, 40))
    optimizer, compression = distributed(model, "bf16", optimizer_options={"backward_passes_per_step": 3})
    for step in range(2):
        optimizer.zero_grad()
        for k in range(3):
            model.backward(w=random(40, 40, step=10 * step + k))
        optimizer.synchronize()
        mine = sum(random(40, 40, step=10 * step + k) for k in range(3))
        assert_mean_of_bfloat16(model.w.grad, gather(mine), exchange)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert compression.stats.steps == 2


@pytest.mark.parametrize("groups", ["number", "lists"])
def test_groups(groups):
    expected, _ = run()
    model = convnet()
    parameters = list(model.parameters())
    optimizer, _ = distributed(
        model, "adacomp", optimizer_options={"groups": 2 if groups == "number" else [parameters[:3], parameters[5:7]]}
    )
    train(model, optimizer, 4)
    assert torch.equal(weights(model), expected)


def test_gradient_predivide_factor_changes_nothing():
    expected, _ = run()
    predivided, _ = run(optimizer_options={"gradient_predivide_factor": 3.0})
    torch.testing.assert_close(predivided, expected, rtol=1e-5, atol=1e-6)


def test_sum_is_the_mean_times_the_ranks(ranks):
    mean, _ = run(steps=1)
    start = weights(convnet())
    total, _ = run(steps=1, optimizer_options={"op": hvd.Sum})
    torch.testing.assert_close(total - start, (mean - start) * ranks, rtol=1e-4, atol=1e-6)


def test_clipping_between_synchronize_and_step():
    model = convnet()
    optimizer, _ = distributed(model, "nuqsgd:bits=4")
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        assert norm <= 0.0101
        assert_equal_on_all_ranks(model.parameters())


def test_forgotten_skip_synchronize_changes_nothing_and_is_said():
    def clipped(forget):
        model = convnet()
        optimizer, compression = distributed(model, "adacomp")
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if forget:
                optimizer.step()
            else:
                with optimizer.skip_synchronize():
                    optimizer.step()
        return weights(model), compression.state_dict()["residuals"]

    expected, residuals = clipped(forget=False)
    with pytest.warns(UserWarning, match="without a backward pass since the last synchronize"):
        got, kept = clipped(forget=True)
    # Biases are averaged a second time by Horovod itself, which rounds.
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    for name, residual in residuals.items():
        torch.testing.assert_close(kept[name], residual, rtol=1e-4, atol=1e-5)


def test_sparse_gradients_pass_through():
    torch.manual_seed(3)
    embedding = torch.nn.Embedding(200, 16, sparse=True)
    head = torch.nn.Linear(16, 100)
    model = torch.nn.ModuleDict({"embedding": embedding, "head": head})
    optimizer, _ = distributed(model, "adacomp")
    for step in range(3):
        optimizer.zero_grad()
        x, _ = batch(step)
        ids = (x.flatten()[:32] * 20).long().abs() % 200
        (head(embedding(ids)) ** 2).mean().backward()
        optimizer.step()
        assert embedding.weight.grad.is_sparse
        assert_equal_on_all_ranks(model.parameters())


def test_sparse_as_dense_is_left_to_horovod():
    embedding = torch.nn.Embedding(200, 16, sparse=True)
    optimizer, _ = distributed(embedding, "adacomp", optimizer_options={"sparse_as_dense": True})
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="sent uncompressed"):
        embedding(torch.tensor([1, 2, 3 + hvd.rank()])).sum().backward()
    optimizer.step()
    assert_equal_on_all_ranks(embedding.parameters())


def test_gan_two_optimizers_with_two_compressions():
    """The generator's backward passes through the discriminator, and that result is thrown away, without a trace."""
    torch.manual_seed(11)
    generator, discriminator = torch.nn.Linear(16, 64), torch.nn.Linear(64, 40)
    opt_g, comp_g = distributed(generator, "qsgd:bits=4", lr=0.01, prefix="g")
    opt_d, comp_d = distributed(discriminator, "adacomp", lr=0.01, prefix="d")
    for step in range(4):
        z = random(8, 16, step=step)
        opt_d.zero_grad()
        (discriminator(generator(z).detach()) ** 2).mean().backward()
        opt_d.step()
        before = comp_d.state_dict()["residuals"]["d.weight"]

        opt_g.zero_grad()
        (-discriminator(generator(z))).mean().backward()
        opt_g.step()
        opt_d.synchronize()
        after = comp_d.state_dict()["residuals"]["d.weight"]
        assert torch.equal(before, after)
        assert_equal_on_all_ranks([*generator.parameters(), *discriminator.parameters()])
    assert comp_g.stats.steps == 4
    assert comp_d.stats.steps == 8


def test_hvd_allreduce_takes_it_too(exchange):
    model = Vectors(w=(40, 40), v=(50, 50))
    compression = Compression.bf16(model.named_parameters(), exchange=exchange)
    for step in range(3):
        model.w.grad, model.v.grad = random(40, 40, step=step), random(50, 50, step=step)
        for name, p in model.named_parameters():
            grads = gather(p.grad)
            assert_mean_of_bfloat16(hvd.allreduce(p.grad, name=f"grad.{name}", compression=compression), grads, exchange)


def test_process_set(ranks):
    """A set of two of three ranks; of two ranks, one alone, which has nothing to compress."""
    members = [0, 2] if ranks > 2 else [1]
    process_set = hvd.add_process_set(members)
    try:
        mine = None
        if hvd.rank() in members:
            model = convnet()
            optimizer, compression = distributed(
                model, "adacomp", process_set=process_set, optimizer_options={"process_set": process_set}
            )
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
            mine = weights(model)
            assert (compression.stats.total.bytes_sent > 0) == (len(members) > 1)
        theirs = [w for w in gather(mine) if w is not None]
        assert len(theirs) == len(members)
        assert all(torch.equal(theirs[0], w) for w in theirs)
    finally:
        hvd.remove_process_set(process_set)


def test_optimizer_state_dict_and_load_state_dict():
    expected, _ = run(steps=6)
    model = convnet()
    optimizer, _ = distributed(model, "adacomp")
    train(model, optimizer, 3)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    hvd.broadcast_optimizer_state(optimizer, 0)
    train(model, optimizer, 3, first=3)
    assert torch.equal(weights(model), expected)


def test_step_that_load_state_dict_drops_leaves_no_trace():
    expected, _ = run(steps=4, bucket_bytes=20_000)
    model = convnet()
    optimizer, _ = distributed(model, "adacomp", bucket_bytes=20_000)
    train(model, optimizer, 2)
    loss_of(model, 77).backward()
    while not all(hvd.poll(handle) for handle, _ in optimizer._handles.values()):
        time.sleep(0.01)
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 2, first=2)
    torch.testing.assert_close(weights(model), expected, rtol=0, atol=0)


def test_changing_the_codec_keeps_or_sends_the_residual(exchange):
    model = Vectors(w=(40, 40))
    optimizer, compression = distributed(model, "adacomp")
    total, received = torch.zeros(40, 40), torch.zeros(40, 40)

    def step(number):
        optimizer.zero_grad()
        model.backward(w=random(40, 40, step=number))
        optimizer.step()
        total.add_(random(40, 40, step=number))
        received.add_(model.w.grad)
        assert_equal_on_all_ranks(model.parameters())

    for number in range(3):
        step(number)
    compression.set_codec("adacomp:bin=50,c=1")
    step(3)
    assert str(compression) == "adacomp:bin=50,c=1"
    compression.set_codec("bf16")
    step(4)
    assert compression.state_dict()["residuals"] == {}
    mean = hvd.allreduce(total, name="total")
    roundings = 1 if exchange == "allgather" else 2  # to bfloat16, of the residual, and of their mean
    torch.testing.assert_close(received, mean, rtol=0, atol=0.02 * roundings)
    compression.set_codec("none")
    step(5)


def test_overrides_send_a_bias_and_leave_a_weight():
    model = convnet()
    optimizer, compression = distributed(
        model, "qsgd:bits=4", overrides={"4.weight": "none", "4.*": "adacomp:bin=10", "*.bias": "fp16"}
    )
    train(model, optimizer, 3)
    codecs = {s.parameter.name: str(s.codec) for s in compression.plan.segments}
    assert codecs["4.weight"] == "none"
    assert codecs["4.bias"] == "adacomp:bin=10,c=2"
    assert codecs["6.bias"] == "fp16"
    assert codecs["2.weight"] == "qsgd:bits=4,bucket=512"
    step = compression.stats.step
    assert step.of("4.weight").ratio == 1
    assert step.of("6.bias").ratio == 2
    assert step.of("2.weight").ratio > 14 / hvd.size()


def test_communication_starts_before_backward_ends():
    """The gradient of the first layer is held back until the message of the last one has arrived from every rank."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
    optimizer, compression = distributed(model, "qsgd:bits=4", bucket_bytes=1)
    arrived = []

    def hold_back(_):
        arrived.append(compression._round.transfers[0, False].finish(30))

    for step in range(2):
        optimizer.zero_grad()
        out = model[0](random(4, 64, step=step))
        if step == 1:
            out.register_hook(hold_back)
        model[1:](out).sum().backward()
        optimizer.step()
    assert arrived == [True]


def test_stats_count_what_is_sent(ranks, exchange):
    model = Vectors(w=(100, 100), b=(50,))
    optimizer, compression = distributed(model, "qsgd:bits=4")
    for step in range(3):
        optimizer.zero_grad()
        model.backward(w=random(100, 100, step=step), b=random(50))
        optimizer.step()
    ring = 2 * (ranks - 1) / ranks
    step, total = compression.stats.step, compression.stats.total
    assert step.bytes_dense == pytest.approx(ring * 4 * 10_050)
    head, scales_and_codes = MessageWriter.HEADER_BYTES + MessageWriter.ENTRY_BYTES + 4, 20 * 4 + 10_000 // 2
    sent_by_all = sum(gather(step.of("w").bytes_sent - ring * 16))
    if exchange == "allgather":
        assert sent_by_all == pytest.approx(ranks * (ranks - 1) * (head + scales_and_codes))
    else:  # each chunk has a head; all chunks but the own one are sent, then the own one to all others
        assert sent_by_all == pytest.approx(2 * (ranks - 1) * (ranks * head + scales_and_codes))
    assert step.of("w").exchanges == {exchange}
    assert step.of("b").bytes_sent == pytest.approx(ring * 200)
    assert step.of("b").exchanges == {"allreduce"}
    assert step.exchanges == {exchange, "allreduce"}
    assert total.bytes_sent == pytest.approx(3 * step.bytes_sent)
    assert total.of("w").encode_s > 0
    assert total.encode_s == pytest.approx(total.of("w").encode_s)
    assert step.selected is None
    compression.set_codec("adacomp")
    optimizer.zero_grad()
    model.backward(w=random(100, 100), b=random(50))
    optimizer.step()
    step = compression.stats.step
    assert 0 < step.of("w").selected < 2000
    residual = compression.state_dict()["residuals"]["w"]
    assert step.residual_norm == pytest.approx(residual.norm().item(), rel=1e-4)


def test_backward_orders_that_differ_between_ranks_do_not_deadlock():
    names = [f"p{i}" for i in range(8)]
    model = Vectors(**dict.fromkeys(names, (40, 40)))
    optimizer, _ = distributed(model, "adacomp", bucket_bytes=15_000)
    for step in range(5):
        optimizer.zero_grad()
        for name in names if hvd.rank() % 2 else reversed(names):
            model.backward(**{name: random(40, 40, step=step)})
            time.sleep(0.002 * hvd.rank())
        optimizer.step()
        assert_equal_on_all_ranks(model.parameters())


def test_nothing_is_warned_about_in_ordinary_training():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run("adacomp")
