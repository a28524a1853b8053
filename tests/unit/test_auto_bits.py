"""Quantizers that choose their bits by the largest improvement over cost."""

import math

import numpy as np
import pytest
from reference import quantizers as oracle
from unit.helpers import add, decode, encode

from hvd_compress import PayloadError
from hvd_compress.codecs import make, parse
from hvd_compress.codecs.base import Measured
from hvd_compress.vector import Vector

KINDS = ("qsgd", "qsgdinf", "nuqsgd")
BITS = range(2, 9)
COSTS = {
    "cost=bits": lambda p: 8 * p,
    "cost=packets,c0=5,pmax=200": lambda p: 5 + math.ceil(p / 200),
    "cost=time,latency=1e-5,bandwidth=1e8": lambda p: 1e-5 + p / 1e8,
    "cost=time,latency=1e-3,bandwidth=1e8": lambda p: 1e-3 + p / 1e8,
}


def vectors(n):
    rng = np.random.default_rng(n)
    yield rng.normal(size=n)
    yield rng.standard_t(3, size=n)
    yield rng.normal(size=n) * (rng.random(n) < 0.05)
    yield np.full(n, -0.3)


def objective(kind, v, bucket, error_feedback, cost):
    """Improvement over cost of each number of bits, and the improvement."""
    of_bits, energy = {}, float(np.sum(v.astype(np.float64) ** 2))
    for bits in BITS:
        w = oracle.conditional_variance(kind, v, bits, bucket) / energy
        c = 1 / (1 + oracle.variance_bound(kind, bits, bucket))
        improvement = max(0, 2 * c - c**2 * (1 + w)) if error_feedback else 1 / (1 + w)
        size = 4 + make(kind, bits=bits, bucket=bucket).max_payload(v.size)
        of_bits[bits] = improvement / cost(size), improvement
    return of_bits


@pytest.mark.parametrize("error_feedback", [False, True])
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_the_best(kind, cost, error_feedback):
    for n, bucket in ((1000, 100), (5000, 512), (12_000, 5000)):
        codec = parse(f"{kind}:bits=auto,bucket={bucket},{cost},error_feedback={str(error_feedback).lower()}")
        for v in vectors(n):
            v = v.astype(np.float32)
            of_bits = objective(kind, v, bucket, error_feedback, COSTS[cost])
            result = encode(codec, v, seed=3)
            bits = int(result.payload[0])
            assert of_bits[bits][0] >= max(best for best, _ in of_bits.values()) * (1 - 1e-5)
            assert result.encoded.improvement == pytest.approx(of_bits[bits][1], rel=1e-4)
            assert result.encoded.energy == pytest.approx(np.sum(v.astype(float) ** 2), rel=1e-5)


@pytest.mark.parametrize("bucket", [512, 2**31 - 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_tells_the_same_of_a_large_vector(kind, bucket):
    for v in vectors(400_000):
        v = v.astype(np.float32)
        of_bits = objective(kind, v, min(bucket, v.size), False, COSTS["cost=bits"])
        result = encode(parse(f"{kind}:bits=auto,bucket={bucket},cost=bits"), v)
        assert of_bits[int(result.payload[0])][0] >= 0.99 * max(best for best, _ in of_bits.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("coding", ["fixed", "elias"])
@pytest.mark.parametrize("error_feedback", [False, True])
def test_it_is_the_quantizer_of_those_bits(kind, coding, error_feedback):
    """The same payload behind its head, the same residual; and with ample time another one than with little."""
    v, chosen = np.random.default_rng(0).normal(size=3000).astype(np.float32), set()
    for latency in (1e-9, 1.0):
        options = {"bucket": 64, "coding": coding, "error_feedback": error_feedback}
        codec = make(kind, bits="auto", cost="time", latency=latency, bandwidth=1e9, **options)
        result = encode(codec, v, seed=8)
        bits = int(result.payload[0])
        same = encode(make(kind, bits=bits, **options), v, seed=8)
        assert result.payload[:4].tolist() == [bits] * 4
        assert result.payload[4:].tobytes() == same.payload.tobytes()
        assert (
            decode(codec, result.payload, v.size).tobytes()
            == decode(make(kind, bits=bits, **options), same.payload, v.size).tobytes()
        )
        if error_feedback:
            assert result.residual.tobytes() == same.residual.tobytes()
        chosen.add(bits)
    assert len(chosen) == 2


def test_elias_codes_are_counted_as_they_are():
    """A sparse vector takes a fraction of the bits that each element would."""
    v = (np.random.default_rng(1).normal(size=20_000) * (np.arange(20_000) % 50 == 0)).astype(np.float32)
    sizes = {bits: encode(make("qsgd", bits=bits, coding="elias"), v, seed=2).payload.size for bits in BITS}
    gains = {bits: 1 / (1 + oracle.conditional_variance("qsgd", v, bits, 512) / np.sum(v.astype(float) ** 2)) for bits in BITS}
    bits = int(encode(parse("qsgd:bits=auto,coding=elias,cost=bits"), v).payload[0])
    assert gains[bits] / sizes[bits] >= 0.97 * max(gains[b] / sizes[b] for b in BITS)


def test_what_is_measured_decides():
    codec, v = parse("qsgd:bits=auto"), np.random.default_rng(0).normal(size=5000).astype(np.float32)
    out, bits = np.empty(codec.max_payload(v.size), np.uint8), []
    for measured in (Measured(1e-9, 1e-6), Measured(10.0, 1e-12), Measured(explore=0.1), Measured(explore=0.0001)):
        codec.encode(Vector.of(v), None, None, 0, Vector.of(out), None, measured)
        bits.append(int(out[0]))
    assert bits[0] < bits[1]
    assert bits[1:] == [8, 8, 5]


@pytest.mark.parametrize("n", [0, 1, 5])
def test_little_or_nothing(n):
    for v in (np.zeros(n, np.float32), np.arange(n, 0, -1, np.float32) // max(n, 1)):
        codec = parse("nuqsgd:bits=auto,cost=bits")
        assert decode(codec, encode(codec, v).payload, n).tolist() == v.tolist()


def test_not_finite():
    v = np.ones(2000, np.float32)
    v[700] = np.nan
    result = encode(parse("qsgd:bits=auto,cost=bits"), v)
    assert not result.encoded.finite
    assert np.isnan(decode(parse("qsgd:bits=auto"), result.payload, 2000)[700])


@pytest.mark.parametrize("coding", ["fixed", "elias"])
def test_damaged_payloads_are_refused(coding):
    codec = parse(f"qsgd:bits=auto,bucket=20,coding={coding},cost=bits")
    payload = encode(codec, np.random.default_rng(0).normal(size=70).astype(np.float32)).payload
    damaged = [payload[:length] for length in range(payload.size)]
    for bit in range(8 * payload.size):
        damaged.append(payload.copy())
        damaged[-1][bit // 8] ^= 1 << bit % 8
    for each in damaged:
        with pytest.raises(PayloadError):
            add(codec, each, np.zeros(70, np.float32))


def test_errors():
    for spec, text in {
        "qsgd:bits=4,cost=bits": "cost='bits' belongs to a codec that chooses how much to send",
        "qsgd:bits=any": r"bits='any' is not allowed; allowed is a whole number from 2 to 8 or 'auto'",
        "qsgd:bits=auto,cost=time,latency=1": "cost='time' needs a latency in seconds and a bandwidth in bytes a second",
        "qsgd:bits=auto,cost=time,latency=1,bandwidth=inf": "bandwidth=inf is not allowed; allowed is a finite number above 0",
        "qsgd:bits=auto,cost=packets,c0=-1": "c0=-1 is not allowed; allowed is a finite number from 0 on",
        "qsgd:bits=auto,cost=money": "cost='money' is not allowed",
    }.items():
        with pytest.raises(ValueError, match=text):
            parse(spec)


@pytest.mark.parametrize("spec", ["qsgd:bits=auto,bucket=512", "nuqsgd:bits=auto,bucket=64,cost=packets,c0=2,c1=1,pmax=100"])
def test_specs(spec):
    assert str(parse(spec)) == spec
    assert parse(spec).is_measured == ("cost" not in spec)
    assert parse(spec).typical_ratio == parse(f"qsgd:bits=4,bucket={parse(spec).bucket}").typical_ratio
