"""The quantizers' random numbers, and their error feedback."""

import itertools

import numpy as np
import pytest
from reference import quantizers as oracle
from unit.helpers import decode, encode

from hvd_compress._kernels import mix_seed
from hvd_compress.codecs import make

CELLS = 16
SPECS = [(kind, bits, bucket) for kind in oracle.KINDS for bits, bucket in ((2, 512), (3, 4096), (4, 512), (8, 100))]


def gaussian(n, seed=0):
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)


def noise(seed, bucket=4097, buckets=16):
    """Which sixteenth of [0, 1) each random number lies in, (buckets, bucket - 1).

    The first value of each bucket is 1, so that the norm is 1; the others are p, which goes up where the number is below p.
    """
    codec = make("qsgdinf", bits=2, bucket=bucket)
    below = np.zeros((buckets, bucket - 1), int)
    for k in range(1, CELLS):
        v = np.full((buckets, bucket), k / CELLS, np.float32)
        v[:, 0] = 1
        up = decode(codec, encode(codec, v.ravel(), seed=seed).payload, v.size).reshape(v.shape)[:, 1:]
        assert np.isin(up, (0, 1)).all()
        below += up == 0
    return below


def deviation(cells, count):
    """Chi-square of a uniform distribution over `count` cells, in standard deviations from its mean."""
    observed = np.bincount(cells.ravel(), minlength=count)
    expected = cells.size / count
    chi_square = np.sum((observed - expected) ** 2) / expected
    return (chi_square - (count - 1)) / np.sqrt(2 * (count - 1))


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**64 - 1])
def test_noise_is_uniform(seed):
    cells = noise(seed)
    assert deviation(cells, CELLS) < 4
    for shift in (1, 2, 16):  # neighbours in a bucket, and the same place in neighbouring buckets
        assert deviation(cells[:, shift:] * CELLS + cells[:, :-shift], CELLS**2) < 4
    assert deviation(cells[1:] * CELLS + cells[:-1], CELLS**2) < 4


@pytest.mark.parametrize(
    ("one", "other"), [((0, 0, 0), (1, 0, 0)), ((0, 0, 0), (0, 1, 0)), ((0, 0, 0), (0, 0, 1)), ((1, 2, 3), (3, 2, 1))]
)
def test_ranks_steps_and_segments_have_their_own_noise(one, other):
    first, second = (noise(mix_seed(42, *key)) for key in (one, other))
    assert deviation(first, CELLS) < 4
    assert deviation(first * CELLS + second, CELLS**2) < 4


def test_mixed_seeds_differ():
    seeds = {mix_seed(*key) for key in itertools.product(range(6), repeat=4)}
    assert len(seeds) == 6**4
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize("coding", ["fixed", "elias"])
@pytest.mark.parametrize("kind", oracle.KINDS)
def test_bytes_depend_on_the_seed_alone(kind, coding):
    v = gaussian(2000)
    codec = make(kind, coding=coding)
    first = encode(codec, v, seed=mix_seed(1, 0, 0, 0)).payload
    assert np.array_equal(first, encode(make(kind, coding=coding), v.copy(), seed=mix_seed(1, 0, 0, 0)).payload)
    for key in ((2, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1)):
        assert not np.array_equal(first, encode(codec, v, seed=mix_seed(*key)).payload)


def test_equal_buckets_round_differently():
    codec = make("qsgd", bucket=512)
    v = np.tile(gaussian(512), 2)
    decoded = decode(codec, encode(codec, v).payload, v.size)
    assert not np.array_equal(decoded[:512], decoded[512:])


def contraction(kind, bits, bucket):
    return 1 / (1 + oracle.variance_bound(kind, bits, bucket))


@pytest.mark.parametrize("coding", ["fixed", "elias"])
@pytest.mark.parametrize(("kind", "bits", "bucket"), SPECS)
def test_feedback_keeps_what_was_lost(kind, bits, bucket, coding):
    n = 2 * bucket + 77
    grad, residual = gaussian(n, seed=1), gaussian(n, seed=2)
    codec = make(kind, bits=bits, bucket=bucket, coding=coding, error_feedback=True)
    result = encode(codec, grad, residual, seed=3)
    decoded = decode(codec, result.payload, n)
    assert np.array_equal(result.residual, grad + residual - decoded)
    assert result.encoded.residual_norm == pytest.approx(np.linalg.norm(result.residual.astype(np.float64)), rel=1e-6)
    # The same rounding as without error_feedback, scaled.
    plain = make(kind, bits=bits, bucket=bucket, coding=coding)
    unscaled = decode(plain, encode(plain, grad + residual, seed=3).payload, n)
    np.testing.assert_allclose(decoded, contraction(kind, bits, bucket) * unscaled, rtol=1e-6)


@pytest.mark.parametrize(("kind", "bits", "bucket"), SPECS)
def test_feedback_contracts(kind, bits, bucket):
    """E ||v - C(v)||^2 <= (1 - delta) ||v||^2, so over steps the residual stays bounded, and what is sent adds up."""
    n, delta = bucket, contraction(kind, bits, bucket)
    codec = make(kind, bits=bits, bucket=bucket, error_feedback=True)
    v = gaussian(n, seed=4)
    left = [encode(codec, v, seed=mix_seed(0, 0, k, 0)).encoded.residual_norm ** 2 for k in range(200)]
    assert np.mean(left) - 4 * np.std(left) / np.sqrt(200) <= (1 - delta) * np.sum(v.astype(np.float64) ** 2)

    residual, total, sent, largest = np.zeros(n, np.float32), np.zeros(n), np.zeros(n), 0.0
    bound = np.sqrt(1 - delta) / (1 - np.sqrt(1 - delta))
    for step in range(300):
        grad = gaussian(n, seed=1000 + step % 50)
        result = encode(codec, grad, residual, seed=mix_seed(0, 0, step, 0))
        sent += decode(codec, result.payload, n)
        total += grad
        residual = result.residual
        largest = max(largest, float(np.linalg.norm(grad)))
        assert result.encoded.residual_norm <= bound * largest
    np.testing.assert_allclose(sent + residual, total, atol=300 * 1e-6 * largest)
