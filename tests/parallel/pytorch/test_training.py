"""Training with every codec: the ranks stay equal, and what comes out is the mean of what each rank sent."""

import horovod.torch as hvd
import pytest
import torch
from helpers import Vectors, assert_equal_on_all_ranks, convnet, distributed, loss_of, random
from parallel.common import COMPRESSED, SPECS

from hvd_compress import _kernels
from hvd_compress.codecs import parse
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


@pytest.mark.parametrize("spec", COMPRESSED)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_result_is_the_mean_or_sum_of_the_decoded_payloads(spec, op, ranks):
    model = Vectors(w=(40, 100))
    optimizer, _ = distributed(model, spec, optimizer_options={"op": op}, exchange="allgather")
    codec = parse(spec).for_shape((40, 100))
    residuals = [torch.zeros(4000) if codec.has_residual else None for _ in range(ranks)]
    for step in range(1, 4):
        optimizer.zero_grad()
        model.backward(w=random(40, 100, step=step))
        optimizer.synchronize()
        expected = torch.zeros(4000)
        for rank in range(ranks):
            grad = random(40, 100, step=step, rank=rank).flatten()
            out = torch.empty(codec.max_payload(4000), dtype=torch.uint8)
            left = torch.empty(4000) if codec.has_residual else None
            seed = _kernels.mix_seed(0, rank, step, 0)
            before = residuals[rank]
            encoded = codec.encode(
                vector(grad),
                None if before is None else vector(before),
                None if left is None else vector(left),
                seed,
                vector(out),
            )
            residuals[rank] = left
            weight = 1 / ranks if op == hvd.Average else 1.0
            codec.decode_add(vector(out[: encoded.bytes]), weight, vector(expected))
        assert torch.equal(model.w.grad.flatten(), expected)
        with optimizer.skip_synchronize():
            optimizer.step()


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
