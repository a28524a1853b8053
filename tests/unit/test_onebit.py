"""onebit against the paper's formulas, and its identities."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import onebit
from unit.helpers import decode, encode

from hvd_compress.codecs import parse

SCALES = ("l1", "l2")
SIZES = (0, 1, 7, 8, 9, 1023, 1024, 1025, 5000)


def codec(scale):
    return parse(f"onebit:scale={scale}")


def normal(n, seed=0):
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("n", SIZES)
def test_matches_the_reference(scale, n):
    residual = np.zeros(n, np.float32)
    for step in range(3):
        grad = normal(n, seed=step)
        u = grad + residual
        result = encode(codec(scale), grad, residual)
        body = onebit.payload_body(u, scale)
        assert result.payload.size == 8 + (n + 7) // 8
        np.testing.assert_allclose(result.payload[4:8].view("<f4"), np.frombuffer(body[:4], "<f4"), rtol=1e-6)
        assert result.payload[8:].tobytes() == body[4:]
        decoded = decode(codec(scale), result.payload, n)
        np.testing.assert_allclose(decoded, onebit.compress(u, scale), rtol=1e-6)
        np.testing.assert_allclose(result.residual, u - onebit.compress(u, scale), atol=1e-6)
        residual = result.residual


def test_by_hand():
    grad = np.float32([3, -4, 0, -0.0, 0])
    for scale, size in (("l1", 7 / 5), ("l2", 5**0.5)):
        result = encode(codec(scale), grad)
        assert result.payload[8] == 0b00010  # 0 and -0 are positive
        np.testing.assert_allclose(decode(codec(scale), result.payload, 5), size * np.float32([1, -1, 1, 1, 1]), rtol=1e-6)
        np.testing.assert_allclose(result.residual, grad - size * np.float32([1, -1, 1, 1, 1]), rtol=1e-6)


@pytest.mark.parametrize("n", SIZES[1:])
def test_l2_keeps_the_norm_and_l1_loses_least(n):
    u = normal(n).astype(np.float64)
    norm, mean = np.linalg.norm(u), np.abs(u).mean()
    decoded = {scale: decode(codec(scale), encode(codec(scale), normal(n)).payload, n).astype(np.float64) for scale in SCALES}
    assert np.linalg.norm(decoded["l2"]) == pytest.approx(norm, rel=1e-6)
    r = n * mean / (np.sqrt(n) * norm)
    assert np.sum((u - decoded["l2"]) ** 2) == pytest.approx(2 * norm**2 * (1 - r), rel=1e-4, abs=1e-6 * norm**2)
    assert np.sum((u - decoded["l1"]) ** 2) == pytest.approx(norm**2 * (1 - r**2), rel=1e-4, abs=1e-6 * norm**2)


@given(st.integers(0, 2000), st.integers(1, 6), st.sampled_from(SCALES))
def test_nothing_is_lost(n, steps, scale):
    residual, sent, given_ = np.zeros(n, np.float32), np.zeros(n), np.zeros(n)
    for step in range(steps):
        grad = normal(n, seed=step)
        result = encode(codec(scale), grad, residual)
        residual = result.residual
        sent += decode(codec(scale), result.payload, n)
        given_ += grad
    np.testing.assert_allclose(sent + residual, given_, atol=1e-5)


@pytest.mark.parametrize("scale", SCALES)
def test_bytes(scale):
    assert encode(codec(scale), normal(100_000)).payload.size == 8 + 12_500
