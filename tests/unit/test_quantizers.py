"""QSGD, QSGDinf and NUQSGD against the oracle: levels, norms, the bytes on the wire, bias and variance."""

import numpy as np
import pytest
from reference import elias
from reference import quantizers as oracle
from unit.helpers import decode, encode, ratio_of

from hvd_compress._kernels import mix_seed
from hvd_compress.codecs import make

KINDS = oracle.KINDS
BITS = range(2, 9)
BUCKETS = (1, 7, 100, 128, 512, 513, 1000, 8192)


def gaussian(n, seed=0):
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)


def norms_of(payload, n, bits, bucket):
    """The norms in a fixed-width payload."""
    at, norms = 4, []
    for start in range(0, n, bucket):
        norms.append(payload[at : at + 4].view("<f4")[0])
        at += 4 + (min(bucket, n - start) * bits + 7) // 8
    assert at == payload.size
    return np.array(norms, np.float32)


def codes_of(kind, decoded, norms, bits, bucket):
    """Signed level numbers: the level that |decoded| / norm is nearest to."""
    own = norms.astype(np.float64)[np.arange(decoded.size) // bucket]
    ratios = np.divide(np.abs(decoded.astype(np.float64)), own, out=np.zeros(decoded.size), where=own > 0)
    table = oracle.levels(kind, bits)
    if kind == "nuqsgd":
        with np.errstate(divide="ignore"):
            level = np.where(ratios > 0, table.size - 1 + np.round(np.log2(ratios)), 0).astype(int)
    else:
        level = np.round(ratios * (table.size - 1)).astype(int)
    np.testing.assert_allclose(table[level], ratios, rtol=3e-7)
    return level * np.sign(decoded).astype(int)


def neighbours(kind, v, bits, bucket):
    """The oracle's signed level numbers next to each value, the lower and the upper one."""
    return [oracle.round_buckets(kind, v, bits, bucket, np.full(v.size, u))[0] for u in (1.0, 0.0)]


def sample(n, bucket):
    """Gaussian values of several magnitudes, some of them zero of either sign, and one bucket of zeros."""
    v = gaussian(n, seed=n) * np.float32(10.0) ** np.random.default_rng(n).integers(-3, 2, n).astype(np.float32)
    v[::11], v[5::11] = 0.0, -0.0
    v[bucket : 2 * bucket] = 0
    return v


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", KINDS)
def test_levels_norms_and_bytes(kind, bits, bucket):
    n = min(4 * bucket + bucket // 3 + 1, 2 * bucket + 1003)
    v = sample(n, bucket)
    fixed = make(kind, bits=bits, bucket=bucket)
    payload = encode(fixed, v, seed=bits).payload
    norms = norms_of(payload, n, bits, bucket)
    exact = [oracle.norm(kind, v[i : i + bucket]) for i in range(0, n, bucket)]
    np.testing.assert_allclose(norms, exact, rtol=3e-7)

    decoded = decode(fixed, payload, n)
    codes = codes_of(kind, decoded, norms, bits, bucket)
    lower, upper = neighbours(kind, v, bits, bucket)
    ratios = np.abs(oracle.values(kind, lower, exact, bits, bucket))
    close = np.abs(np.abs(v) - ratios) <= 2e-6 * np.abs(v)  # on the lower level but for a rounding, which may go below
    close |= np.abs(np.abs(v) - np.abs(oracle.values(kind, upper, exact, bits, bucket))) <= 2e-6 * np.abs(v)
    low, high = np.minimum(lower, upper) - close, np.maximum(lower, upper) + close
    assert ((low <= codes) & (codes <= high)).all()

    negative = np.signbit(v)
    assert payload[4:].tobytes() == oracle.pack_fixed(codes, norms, bits, bucket, negative)
    sparse = make(kind, bits=bits, bucket=bucket, coding="elias")
    result = encode(sparse, v, seed=bits)
    assert result.payload[4:].tobytes() == elias.pack(codes, norms, bucket, negative)
    assert np.array_equal(decode(sparse, result.payload, n), decoded)
    assert result.encoded[:4] == (result.payload.size, None, 0.0, True)


@pytest.mark.parametrize("n", [0, 1, 2, 127, 129, 511, 1024, 1025])
@pytest.mark.parametrize("coding", ["fixed", "elias"])
@pytest.mark.parametrize("bits", [2, 3, 5, 8])
def test_sizes_of_the_last_bucket(bits, coding, n):
    v = gaussian(n)
    codec = make("qsgd", bits=bits, bucket=512, coding=coding)
    payload = encode(codec, v).payload
    decoded = decode(codec, payload, n)
    plain = make("qsgd", bits=bits, bucket=512)
    norms = norms_of(encode(plain, v).payload, n, bits, 512)
    codes = codes_of("qsgd", decoded, norms, bits, 512)
    pack = oracle.pack_fixed(codes, norms, bits, 512, v < 0) if coding == "fixed" else elias.pack(codes, norms, 512, v < 0)
    assert payload[4:].tobytes() == pack


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_unbiased_with_the_exact_variance(kind, bits):
    n, bucket, runs = 300, 128, 3000
    v = gaussian(n, seed=7)
    v[::3] *= 0.05
    codec = make(kind, bits=bits, bucket=bucket)
    drawn = np.array([decode(codec, encode(codec, v, seed=mix_seed(1, 0, k, 0)).payload, n) for k in range(runs)], np.float64)
    errors = drawn - v

    norms = [oracle.norm(kind, v[i : i + bucket]) for i in range(0, n, bucket)]
    low, high = (np.abs(oracle.values(kind, c, norms, bits, bucket)) for c in neighbours(kind, v, bits, bucket))
    variance = np.maximum((np.abs(v) - low) * (high - np.abs(v)), 0)  # of each element
    assert variance.sum() == pytest.approx(oracle.conditional_variance(kind, v, bits, bucket))
    up = np.divide(np.abs(v) - low, high - low, out=np.zeros(n), where=high > low)
    often = runs * np.minimum(up, 1 - up) > 20  # often enough for the mean to be normal
    z = errors.mean(axis=0)[often] / np.sqrt(variance[often] / runs)
    assert np.abs(z).max(initial=0) < 5
    for direction in (np.ones(n), np.sign(v)):
        assert abs(errors.mean(axis=0) @ direction) < 4 * np.sqrt(variance.sum() / runs) + 1e-5

    squares = (errors**2).sum(axis=1)
    assert squares.mean() == pytest.approx(variance.sum(), abs=4 * squares.std() / np.sqrt(runs))
    assert squares.mean() <= oracle.variance_bound(kind, bits, bucket) * np.sum(v.astype(np.float64) ** 2)
    nonzeros = np.count_nonzero(drawn, axis=1)
    expected = oracle.expected_nonzeros(kind, v, bits, bucket)
    assert nonzeros.mean() == pytest.approx(expected, abs=4 * nonzeros.std() / np.sqrt(runs))


@pytest.mark.parametrize("bits", BITS)
def test_maximum_norm_bounds_every_error(bits):
    bucket, v = 512, gaussian(100_000)
    codec = make("qsgdinf", bits=bits, bucket=bucket)
    error = np.abs(decode(codec, encode(codec, v).payload, v.size) - v)
    largest = np.array([np.abs(v[i : i + bucket]).max() for i in range(0, v.size, bucket)])
    assert (error <= largest[np.arange(v.size) // bucket] / (2 ** (bits - 1) - 1) * (1 + 1e-6)).all()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("coding", ["fixed", "elias"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_value_alone_is_exact(kind, bits, coding, seed):
    codec = make(kind, bits=bits, bucket=64, coding=coding)
    v = np.zeros(200, np.float32)
    v[[3, 70, 190]] = 0.3, -7.0, 1e-5  # the bucket from 128 on ends with the last one; each is its bucket's norm
    assert np.array_equal(decode(codec, encode(codec, v, seed=seed).payload, v.size), v)


@pytest.mark.parametrize("bits", BITS)
def test_integers_on_the_levels_stay(bits):
    s = 2 ** (bits - 1) - 1
    v = np.arange(-s, s + 1).astype(np.float32)
    for seed in range(20):
        codec = make("qsgdinf", bits=bits, bucket=512)
        assert np.array_equal(decode(codec, encode(codec, v, seed=seed).payload, v.size), v)


@pytest.mark.parametrize(("bits", "power"), [(b, p) for b in BITS for p in range(min(7, 2 ** (b - 1) - 1))])
def test_powers_of_two_on_the_levels_stay(bits, power):
    """4^k values of 2^-k have norm 1, and NUQSGD has a level 2^-k for k = 0..2^(bits-1) - 2."""
    v = np.full(4**power, 2.0**-power, np.float32)
    v[::2] *= -1
    codec = make("nuqsgd", bits=bits, bucket=4096)
    for seed in range(20):
        assert np.array_equal(decode(codec, encode(codec, v, seed=seed).payload, v.size), v)


@pytest.mark.parametrize("coding", ["fixed", "elias"])
@pytest.mark.parametrize("kind", KINDS)
def test_zero_buckets_decode_to_zero(kind, coding):
    codec = make(kind, coding=coding, bucket=100)
    v = gaussian(350)
    v[100:200] = 0
    v[300:] = -0.0
    decoded = decode(codec, encode(codec, v).payload, 350)
    assert not decoded[100:200].any()
    assert not decoded[300:].any()
    assert decoded[:100].any()


def test_elias_takes_about_half_a_bit_an_element():
    n = 1 << 18
    sizes = {}
    for coding in ("fixed", "elias"):
        sizes[coding] = encode(make("nuqsgd", bits=3, bucket=4096, coding=coding), gaussian(n)).payload.size
    assert 0.45 < 8 * sizes["elias"] / n < 0.56
    assert sizes["elias"] < sizes["fixed"] / 5


@pytest.mark.parametrize("bits", BITS)
def test_fixed_takes_its_bits_an_element(bits):
    n = 1 << 16
    payload = encode(make("qsgd", bits=bits, bucket=512), gaussian(n)).payload
    assert payload.size == 4 + n // 512 * 4 + n * bits // 8
    assert ratio_of(payload, n) == pytest.approx(32 / (bits + 32 / 512), rel=1e-3)
