"""AdaComp against the oracle: selection, words, residual, and the figures of the steady state."""

import numpy as np
import pytest
from reference import adacomp as oracle
from unit.helpers import decode, encode, ratio_of

from hvd_compress.codecs import AdaComp

BINS = (1, 4, 50, 63, 64, 500, 16383)
SIZES = (0, 1, 3, "bin-1", "bin", "bin+1", "7*bin+3", 1023, 2500)


def size_of(size, bin):
    return {"bin-1": bin - 1, "bin": bin, "bin+1": bin + 1, "7*bin+3": 7 * bin + 3}.get(size, size)


def data(kind, n, seed):
    """A residual and a gradient; dyadic ones are a multiple of 1/8, so that float32 is exact and ties are frequent."""
    rng = np.random.default_rng(seed)
    if kind == "dyadic":
        return tuple((rng.integers(-16, 17, n) / 8).astype(np.float32) for _ in range(2))
    return tuple(rng.normal(size=n).astype(np.float32) for _ in range(2))


def oracle_of(residual, grad, bin, c=2.0):
    """The oracle on the float32 G, so that a rounding of G cannot turn a comparison: R and dW that add up exactly to it."""
    total = (residual + grad).astype(np.float64)
    return oracle.step(total - grad.astype(np.float64), grad, bin, c)


def unseal(payload):
    return payload[4:].tobytes()


def test_golden_vector():
    residual = np.array([0.5, -1, 0.2, 0, 0.3, -0.3, 0.1, 0, 0.7, -0.2], np.float32)
    grad = np.array([0.5, 0.3, -0.9, 0.4, 0, -0.1, 0.2, 0, -0.4, 0.1], np.float32)
    codec = AdaComp(bin=4)
    result = encode(codec, grad, residual)
    scale = 0.5666667
    expected = [scale, 0, -scale, 0, 0, -scale, scale, 0, 0, 0]
    np.testing.assert_allclose(decode(codec, result.payload, 10), expected, rtol=1e-6)
    left = [0.433333, -0.7, -0.133333, 0.4, 0.3, 0.166667, -0.266667, 0, 0.3, -0.1]
    np.testing.assert_allclose(result.residual, left, atol=1e-6)
    assert result.encoded.selected == 4
    assert result.encoded.residual_norm == pytest.approx(np.linalg.norm(left), rel=1e-5)
    sign, last = 0x80, 0x40
    words = [0, 2 | sign | last, 1 | sign, 2 | last, 0x3F | last]
    assert result.payload[8:].tolist() == words
    assert result.payload[4:8].view("<f4")[0] == np.float32(np.mean([1, np.float32(0.4), np.float32(0.3)]))


@pytest.mark.parametrize("kind", ["dyadic", "normal"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bin", BINS)
def test_payload_is_the_oracles(bin, size, kind):
    n = size_of(size, bin)
    residual, grad = data(kind, n, seed=n + bin)
    codec = AdaComp(bin=bin)
    result = encode(codec, grad, residual)
    expected = oracle_of(residual, grad, bin)
    assert unseal(result.payload) == oracle.payload(expected, bin)
    assert result.encoded.selected == expected.selected.sum()
    assert result.encoded.finite
    np.testing.assert_allclose(decode(codec, result.payload, n), expected.sent, rtol=1e-6)
    np.testing.assert_allclose(result.residual, expected.residual, atol=1e-6)
    # Computed from sums over G, so that it is as exact as they are.
    sum_sq = np.sum((residual + grad).astype(np.float64) ** 2)
    assert result.encoded.residual_norm**2 == pytest.approx(np.sum(expected.residual**2), abs=1e-6 * sum_sq + 1e-30)


@pytest.mark.parametrize("c", [1.0, 1.5, 2.0, 3.0, 1e6])
@pytest.mark.parametrize("bin", [4, 50, 500])
def test_soft_threshold_factor(bin, c):
    residual, grad = data("dyadic", 1531, seed=bin)
    result = encode(AdaComp(bin=bin, c=c), grad, residual)
    assert unseal(result.payload) == oracle.payload(oracle_of(residual, grad, bin, c), bin)


def test_soft_threshold_factor_that_float32_rounds():
    residual, grad = data("normal", 20000, seed=1)
    expected = oracle_of(residual, grad, 50, 1.1)
    soft = np.abs(residual.astype(np.float64) + grad + 0.1 * grad)
    clear = np.abs(soft - np.repeat(expected.gmax, 50)) > 1e-5  # the others may go either way
    codec = AdaComp(bin=50, c=1.1)
    sent = decode(codec, encode(codec, grad, residual).payload, grad.size) != 0
    assert (sent == expected.selected)[clear].all()
    assert (~clear).sum() < 0.05 * grad.size  # of which the bin maxima without a gradient are most


@pytest.mark.parametrize("bin", [4, 50, 500])
@pytest.mark.parametrize("c", [1.0, 2.0])
def test_many_steps(bin, c):
    """Each step starts from the kernel's residual: a rounding does not carry the two apart."""
    n, rng, codec = 2503, np.random.default_rng(bin), AdaComp(bin=bin, c=c)
    residual = np.zeros(n, np.float32)
    total, total_sent, largest = np.zeros(n), np.zeros(n), 0.0
    for _ in range(60):
        grad = rng.normal(size=n).astype(np.float32)
        expected = oracle_of(residual, grad, bin, c)
        result = encode(codec, grad, residual)
        sent = decode(codec, result.payload, n)
        assert np.array_equal(sent != 0, expected.selected)
        assert result.payload[4:8].view("<f4")[0] == pytest.approx(expected.scale, rel=1e-6)
        largest = max(largest, np.abs(expected.residual).max(), expected.gmax.max())
        np.testing.assert_allclose(result.residual, expected.residual, rtol=0, atol=3e-7 * largest)
        assert result.encoded.residual_norm == pytest.approx(np.linalg.norm(expected.residual), rel=1e-4)
        residual = result.residual
        total, total_sent = total + grad, total_sent + sent
    # Nothing is lost: what was sent and what is left are the sum of the gradients.
    np.testing.assert_allclose(total_sent + residual, total, rtol=0, atol=60 * 3e-7 * largest)


def test_empty_bins_and_an_empty_layer():
    """At the bin's maximum the gradient points back: |H| = 0.5 < |G| = 1."""
    codec = AdaComp(bin=4)
    residual, grad = np.zeros(8, np.float32), np.zeros(8, np.float32)
    residual[1], grad[1] = 1.5, -0.5
    result = encode(codec, grad, residual)
    assert result.payload.size == 8
    assert result.encoded.selected == 0
    assert np.array_equal(result.residual, residual + grad)
    assert not decode(codec, result.payload, 8).any()
    residual[6] = 1
    result = encode(codec, grad, residual)
    assert result.payload[8:].tolist() == [0x3F | 0x40, 2 | 0x40]
    assert unseal(result.payload) == oracle.payload(oracle_of(residual, grad, 4), 4)


@pytest.mark.parametrize("bin", BINS)
@pytest.mark.parametrize("n", [0, 1, 5000])
def test_all_zero_layer_has_a_header_only(n, bin):
    result = encode(AdaComp(bin=bin), np.zeros(n, np.float32))
    assert result.payload.size == 8
    assert not result.payload[4:].any()
    assert not result.residual.any()


def test_nothing_is_sent_where_the_sum_is_zero():
    """R = -dW: |H| = |dW| reaches the bin's maximum, but sign(0) = 0."""
    residual = np.array([-2, 1, 0, 0], np.float32)
    grad = np.array([2, 0, 0, 0], np.float32)
    codec = AdaComp(bin=4)
    result = encode(codec, grad, residual)
    assert decode(codec, result.payload, 4).tolist() == [0, 1, 0, 0]


def test_zero_gradient_selects_exactly_the_maxima():
    residual = np.random.default_rng(5).normal(size=1000).astype(np.float32)
    codec = AdaComp(bin=50)
    sent = decode(codec, encode(codec, np.zeros(1000, np.float32), residual).payload, 1000)
    assert np.flatnonzero(sent).tolist() == [b * 50 + np.abs(residual[b * 50 :][:50]).argmax() for b in range(20)]


def steady_state(codec, n, steps, draw, drift=0.0, last=100):
    """Mean over the `last` steps of selected elements and of the payload's bytes; and the residual that is left."""
    rng = np.random.default_rng(0)
    mean = (drift * rng.normal(size=n)).astype(np.float32)
    residual, selected, size = np.zeros(n, np.float32), 0, 0
    for step in range(steps):
        result = encode(codec, draw(rng, n) + mean, residual)
        residual = result.residual
        if step >= steps - last:
            selected += result.encoded.selected / last
            size += result.payload.size / last
    return selected, size, residual


def gaussian(rng, n):
    return rng.standard_normal(n, np.float32)


def laplace(rng, n):
    return rng.standard_exponential(n, np.float32) * np.where(rng.integers(0, 2, n, np.uint8), np.float32(1), np.float32(-1))


@pytest.mark.parametrize(("bin", "expected", "within"), [(50, 4.94, 0.15), (500, 5.74, 0.3)])
def test_selected_in_the_steady_state(bin, expected, within):
    n = 100_000
    selected, _, _ = steady_state(AdaComp(bin=bin), n, 300, gaussian, drift=0.05)
    assert selected / (n / bin) == pytest.approx(expected, abs=within)


@pytest.mark.parametrize(
    ("bin", "draw", "least"),
    [(50, gaussian, 38), (500, gaussian, 165), (500, laplace, 190)],
    ids=["bin50-gaussian", "bin500-gaussian", "bin500-laplace"],
)
def test_ratio_in_the_steady_state(bin, draw, least):
    n = 200_000
    _, size, _ = steady_state(AdaComp(bin=bin), n, 250, draw)
    assert 4 * n / size >= least


def test_bin_maxima_only_leave_more_behind():
    norms = {}
    for c in (1.0, 2.0):
        _, _, residual = steady_state(AdaComp(bin=50, c=c), 20_000, 300, gaussian, drift=0.05)
        norms[c] = np.linalg.norm(residual)
    assert norms[1.0] > 1.5 * norms[2.0]


@pytest.mark.parametrize(("bin", "width"), [(1, 1), (63, 1), (64, 2), (16383, 2)])
def test_one_word_a_selected_element(bin, width):
    grad = np.full(20_000, 0.5, np.float32)
    codec = AdaComp(bin=bin)
    result = encode(codec, grad)
    assert result.encoded.selected == grad.size
    assert result.payload.size == 8 + width * grad.size == codec.max_payload(grad.size)
    assert ratio_of(result.payload, grad.size) == pytest.approx(4 / width, rel=1e-3)
    assert np.array_equal(decode(codec, result.payload, grad.size), grad)
