"""Training with every codec: the ranks stay equal, and what comes out is the mean of what each rank sent."""

import horovod.torch as hvd
import pytest
import torch
from helpers import Vectors, assert_equal_on_all_ranks, convnet, distributed, loss_of, random
from parallel.common import COMPRESSED, SPECS

from hvd_compress import _kernels
from hvd_compress.codecs import parse
from hvd_compress.codecs.base import ASSUMED, Measured
from hvd_compress.torch.memory import vector


@pytest.mark.gloo
@pytest.mark.parametrize("spec", SPECS)
def test_parameters_are_bitwise_equal_after_every_step(spec, exchange):
    model = convnet()
    optimizer, compression = distributed(model, spec, lr=0.3, bucket_bytes=40_000)
    first = None
    steps = 25 if exchange == "allgather" else 50  # what two residuals hold back comes later
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        optimizer.step()
        assert_equal_on_all_ranks(model.parameters())
        first = first or loss.item()
    assert loss.item() < 0.8 * first
    assert compression.stats.steps == steps


EXPLORED = [0.01, 0.001, 0.1]
"""Parts of the elements that are sent in the first steps where the cost is measured."""


class Simulated:
    """What a codec makes of vectors that are encoded together, step after step, with the residuals that it leaves."""

    def __init__(self, codecs, sizes):
        self.codecs, self.sizes = codecs, sizes
        self.residuals = [torch.zeros(n) if codec.has_residual else None for codec, n in zip(codecs, sizes, strict=True)]

    def payloads(self, vectors, seeds, measured):
        left = [None if r is None else torch.empty_like(r) for r in self.residuals]
        buffers = [
            [None if t is None else vector(t) for t in (v, before, after)]
            for v, before, after in zip(vectors, self.residuals, left, strict=True)
        ]
        self.residuals = left
        out = [torch.empty(codec.max_payload(n), dtype=torch.uint8) for codec, n in zip(self.codecs, self.sizes, strict=True)]
        rooms = [vector(room) for room in out]
        if self.codecs[0].is_joint:
            scope = self.codecs[0].new_scope()
            for i, each in enumerate(buffers):
                scope.add(i, *each)
            scope.choose(measured)
            encoded = [scope.encode(i, seed, room) for i, (seed, room) in enumerate(zip(seeds, rooms, strict=True))]
        else:
            arguments = zip(self.codecs, buffers, seeds, rooms, strict=True)
            encoded = [codec.encode(*each, seed, room, None, measured) for codec, each, seed, room in arguments]
        return [room[: each.bytes] for room, each in zip(out, encoded, strict=True)]


def decoded(codec, payloads, weight, n):
    out = torch.empty(n)
    codec.decode([vector(payload) for payload in payloads], weight, vector(out))
    return out


class Owner:
    """Of a piece of a segment: encodes the mean again, by itself."""

    def __init__(self, codec, rank, segment, begin, end):
        self.codec, self.rank, self.segment, self.where = codec, rank, segment, slice(begin, end)
        self.residual = torch.zeros(end - begin) if codec.has_residual else None

    def again(self, mean, seed, weight, measured):
        if self.codec.shares_seed:  # all have sent the same elements, and so does the owner
            return weight * mean
        left = None if self.residual is None else torch.empty_like(self.residual)
        out = torch.empty(self.codec.max_payload(mean.numel()), dtype=torch.uint8)
        buffers = [None if t is None else vector(t) for t in (mean, self.residual, left)]
        encoded = self.codec.encode(*buffers, seed, vector(out), None, measured)
        self.residual = left
        return decoded(self.codec, [out[: encoded.bytes]], weight, mean.numel())


@pytest.mark.parametrize("spec", COMPRESSED)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_result_is_the_mean_or_sum_of_what_each_rank_sent(spec, op, exchange, ranks):
    """In a scatter-gather: of what the owners of its pieces made of that mean, which they encode with their own residuals."""
    shapes = {"a": (40, 100), "b": (30, 41)}
    model = Vectors(**shapes)
    optimizer, compression = distributed(model, spec, optimizer_options={"op": op}, exchange=exchange)
    codecs = [parse(spec).for_shape(shape) for shape in shapes.values()]
    sizes = [4000, 1230]
    senders = [Simulated(codecs, sizes) for _ in range(ranks)]
    chunks = _kernels.Chunks([(i, codecs[i].kernel, n) for i, n in enumerate(sizes)], ranks)
    owners = [Owner(codecs[piece[0]], rank, *piece) for rank in range(ranks) for piece in chunks.pieces(rank)]
    total = 1 if op == hvd.Average else ranks
    for step in range(1, 4):
        measured = Measured(explore=EXPLORED[step - 1]) if codecs[0].is_measured else ASSUMED
        optimizer.zero_grad()
        model.backward(**{name: random(*shape, step=step) for name, shape in shapes.items()})
        optimizer.synchronize()
        sent = []
        for rank, sender in enumerate(senders):
            grads = [random(*shape, step=step, rank=rank).flatten() for shape in shapes.values()]
            seeds = [_kernels.mix_seed(0, 0 if codecs[i].shares_seed else rank, step, i) for i in range(len(sizes))]
            sent.append(sender.payloads(grads, seeds, measured))
        weight = (total if exchange == "allgather" else 1) / ranks
        results = [decoded(codecs[i], [payloads[i] for payloads in sent], weight, n) for i, n in enumerate(sizes)]
        for owner in owners if exchange == "scatter-gather" else []:
            result, seed = results[owner.segment], _kernels.mix_seed(0, ranks + owner.rank, step, owner.segment)
            result[owner.where] = owner.again(result[owner.where].clone(), seed, total, measured)
        for p, result in zip(model.parameters(), results, strict=True):
            assert torch.equal(p.grad.flatten(), result)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert compression.stats.total.exchanges == {exchange}


def test_noise_differs_between_ranks_and_repeats_between_runs(exchange):
    def run(seed):
        model = Vectors(w=(64, 64))
        optimizer, _ = distributed(model, "qsgdinf:bits=2,bucket=64", seed=seed)
        half = torch.full((64, 64), 0.5)
        half[:, 0] = 1.0
        model.backward(w=half)
        optimizer.synchronize()
        return model.w.grad

    first = run(0)
    assert torch.equal(first, run(0))
    assert not torch.equal(first, run(5))
    if exchange == "allgather":  # each rank sends 0 or 1 for 0.5: with the same noise everywhere, so would the mean be
        assert ((first > 0) & (first < 1)).float().mean() > 0.4
    else:  # 64 * 63 times 0 or 1: no bias beyond 4 standard deviations
        assert first[:, 1:].mean().item() == pytest.approx(0.5, abs=0.032)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("spec", ["adacomp", "nuqsgd:bits=4", "none"])
def test_other_dtypes_come_out_as_they_went_in(dtype, spec):
    model = convnet(dtype)
    optimizer, _ = distributed(model, spec, optimizer_options={"groups": 2} if dtype == torch.float64 else None)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step, dtype).backward()
        optimizer.step()
        assert all(p.grad.dtype == dtype for p in model.parameters())
        assert_equal_on_all_ranks(model.parameters())
