"""topk, randomk and CAT against the oracle: how much is sent, what, in how many bytes, and what stays."""

import functools
import math

import numpy as np
import pytest
import torch
from reference import cat
from sklearn.datasets import load_digits
from unit.helpers import decode, decode_sum, encode

from hvd_compress.codecs import Encoded, parse
from hvd_compress.codecs.base import Measured
from hvd_compress.vector import Vector

SCHEMES = tuple(cat.HEAD_BYTES)
FEEDBACK = ("topk", "topk+sign")
# "measured" is with the numbers of before anything was measured.
COSTS = {
    "cost=bits": cat.bits(),
    "cost=packets": cat.packets(),
    "cost=packets,c0=3,c1=0.5,pmax=40": cat.packets(3, 0.5, 40),
    "cost=time,latency=1e-6,bandwidth=1e8": cat.time(1e-6, 1e8),
    "cost=time,latency=1e-4,bandwidth=1e9": cat.time(1e-4, 1e9),
    "cost=measured": cat.time(1e-3, 125e6),
}


@functools.cache
def real_gradient(steps):
    """Of 1,014,630 weights of an MLP that has learned scikit-learn's digits for so many steps."""
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 970), torch.nn.ReLU(), torch.nn.Linear(970, 970), torch.nn.ReLU(), torch.nn.Linear(970, 10)]
    model = torch.nn.Sequential(*layers)
    for step in range(steps + 1):
        rows = torch.arange(128 * step, 128 * (step + 1)) % len(x)
        gradients = torch.autograd.grad(torch.nn.functional.cross_entropy(model(x[rows]), y[rows]), [*model.parameters()])
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.data -= 0.1 * gradient
    return torch.cat([gradient.flatten() for gradient in gradients]).numpy()


DRAW = {
    "normal": lambda rng, n: rng.normal(size=n),
    "laplace": lambda rng, n: rng.laplace(size=n),
    "t3": lambda rng, n: rng.standard_t(3, n),
    "zeros": lambda rng, n: rng.normal(size=n) * (rng.random(n) < 0.1),
    "uniform": lambda rng, n: rng.uniform(-0.5, 0.5, n),
    "real": lambda rng, n: real_gradient(int(rng.integers(30)))[:n],
}
GOLDEN = np.float32([3, -2, 1, 0.5, -0.25, 0.1, 0, 0])

every_scheme = pytest.mark.parametrize("scheme", SCHEMES)
every_cost = pytest.mark.parametrize("cost", COSTS)


def draw(kind, n, seed=0):
    return DRAW[kind](np.random.default_rng(seed), n).astype(np.float32)


def coarse(v):
    """The magnitudes cut to 2^k (1 + m/128): equal or in different bins of the kernel's histogram, and exact in bfloat16."""
    return (np.asarray(v, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def codec_of(scheme, cost, more=""):
    return parse(f"cat:scheme={scheme},{cost}{more}")


def head(scheme, payload):
    """Of a payload how many values and signs it has, and what a sign stands for."""
    words = payload[4 : cat.HEAD_BYTES[scheme]].view("<u4")
    values = 0 if scheme == "topk+sign" else int(words[0])
    return (values, 0, 0.0) if scheme == "topk" else (values, int(words[-2]), float(words[-1:].view("<f4")[0]))


def chosen(scheme, g, result):
    """T. The stochastic scheme tells it by its level: the others than the `values` largest add up to (T - values) levels."""
    values, _, level = head(scheme, result.payload)
    if scheme != "stochastic" or level == 0:
        return result.encoded.selected
    return round(values + float(cat.magnitudes(g)[values:].sum()) / level)


def check_sent(scheme, g, result, T):
    """That the payload holds what the scheme sends of g for that T, and that the rest is in the residual."""
    values, signs, level = head(scheme, result.payload)
    decoded = decode(codec_of(scheme, "cost=bits"), result.payload, g.size)
    if scheme == "stochastic":
        if level > 0:
            assert level == pytest.approx(cat.level(g, T), rel=1e-6)
            assert (np.abs(g) > level).sum() <= values <= (np.abs(g) >= level).sum()  # level is rounded to float32
        else:  # all, as they are
            assert values == T in (np.count_nonzero(g), g.size)
        as_it_is = np.zeros(g.size, bool)
        as_it_is[np.argsort(-np.abs(g), kind="stable")[:values]] = True
        drawn = (decoded != 0) & ~as_it_is
        assert drawn.sum() == signs
        assert (decoded == np.where(drawn, np.sign(g) * np.float32(level), np.where(as_it_is, g, 0))).all()
    else:
        assert (values or signs) == T
        np.testing.assert_allclose(decoded, cat.sent(g, scheme, T), rtol=1e-6)
        np.testing.assert_allclose(result.residual, g - cat.sent(g, scheme, T), rtol=0, atol=1e-6 * np.abs(g).max())
        assert result.encoded.residual_norm == pytest.approx(np.linalg.norm(result.residual), rel=1e-5)
    assert result.payload.size == cat.payload_bytes(scheme, g.size, values, signs)
    assert result.encoded.selected == values + signs
    assert result.encoded.energy == pytest.approx(np.sum(g.astype(float) ** 2), rel=1e-5)
    assert result.encoded.improvement == pytest.approx(cat.IMPROVEMENT[scheme](g)[T - 1], rel=1e-5)


# --- the oracle


def test_golden_vectors():
    np.testing.assert_allclose(cat.alpha(GOLDEN)[:4], [0.628382, 0.907663, 0.977483, 0.994938], atol=1e-6)
    np.testing.assert_allclose(cat.beta(GOLDEN)[:4], [0.628382, 0.872753, 0.837843, 0.737476], atol=1e-6)
    P, P1 = (cat.paper_bits(np.arange(1, 9), 8, value_bits) for value_bits in (32, 1))
    assert (P[0], P1[0], P1[1]) == (35, 36, 40)
    assert np.argmax(cat.alpha(GOLDEN) / (64 + P)) + 1 == 2
    assert np.argmax(cat.alpha(GOLDEN) / P) + 1 == 1
    assert np.argmax(cat.beta(GOLDEN) / P1) + 1 == 2
    two = [0.875912, 0.583942, 0.291971, 0.145985, 0.072993, 0.029197, 0, 0]
    three = [1, 1, 0.540541, 0.270270, 0.135135, 0.054054, 0, 0]
    np.testing.assert_allclose(cat.water_fill(GOLDEN, 2), two, atol=1e-6)
    np.testing.assert_allclose(cat.water_fill(GOLDEN, 3), three, atol=1e-6)


@pytest.mark.parametrize("kind", DRAW)
def test_improvement_of_water_filling(kind):
    """What is computed for all T at once, against the probabilities of each."""
    g = coarse(draw(kind, 120))
    for T in range(1, np.count_nonzero(g) + 1):
        p = cat.water_fill(g, T)
        assert p.sum() == pytest.approx(T)
        assert cat.omega(g)[T - 1] == pytest.approx(np.sum(g.astype(float) ** 2) / np.sum(g[g != 0] ** 2.0 / p[g != 0]))
        if np.count_nonzero(g) > T:
            assert cat.saturated(g)[T - 1] == (np.abs(g) > cat.level(g, T) * (1 + 1e-9)).sum()


# --- CAT's choice


def small_vectors():
    """With magnitudes that all differ, in bins of their own."""
    for n in (1, 2, 3, 5, 8, 9, 31, 64, 100, 200, 300):
        rng = np.random.default_rng(n)
        for g in [*(draw(rng, n) for draw in DRAW.values()), 2.0 ** rng.uniform(-20, 20, n), 2.0 ** -np.arange(min(n, 30))]:
            distinct = np.unique(np.abs(coarse(g)))
            zeros = np.zeros(rng.integers(0, 2) * n // 2, np.float32)
            yield rng.permutation(np.concatenate([distinct * rng.choice([-1, 1], distinct.size), zeros]).astype(np.float32))


def tied_vectors():
    for n in (2, 9, 64, 300):
        rng = np.random.default_rng(n)
        yield (rng.integers(-3, 4, n) * 0.75).astype(np.float32)
        yield np.repeat(coarse(rng.laplace(size=n)), 3)
        yield np.full(n, -0.3125, np.float32)


@pytest.mark.parametrize("vectors", [small_vectors, tied_vectors])
@every_cost
@every_scheme
def test_the_choice_is_the_best_of_all(scheme, cost, vectors):
    """Of equal ones, and of those that are drawn, not every number is tried, which a byte can be lost by."""
    codec, worst = codec_of(scheme, cost), 1.0
    for seed, g in enumerate(vectors()):
        if not g.any():
            continue
        result = encode(codec, g, seed=seed)
        T, objective = chosen(scheme, g, result), cat.objective(g, scheme, COSTS[cost])
        worst = min(worst, objective[T - 1] / np.nanmax(objective))
        check_sent(scheme, g, result, T)
    inexact = vectors is tied_vectors or (scheme, cost) == ("stochastic", "cost=bits")
    assert worst >= (0.95 if inexact else 1 - 1e-9)


@pytest.mark.parametrize(("n", "seeds"), [(100_000, 6), (1_000_000, 1)])
@pytest.mark.parametrize("kind", DRAW)
@every_scheme
def test_the_choice_is_nearly_the_best_of_large_ones(scheme, kind, n, seeds):
    worst = {}
    for seed in range(seeds):
        g = draw(kind, n, seed)
        improvement, size = cat.IMPROVEMENT[scheme](g), cat.expected_bytes(g, scheme)
        for cost in COSTS:
            result = encode(codec_of(scheme, cost, ",error_feedback=false"), g)
            objective = improvement / COSTS[cost](size)
            ratio = objective[chosen(scheme, g, result) - 1] / np.nanmax(objective)
            worst[cost] = min(worst.get(cost, 1.0), round(float(ratio), 5))
    assert not {cost: ratio for cost, ratio in worst.items() if ratio < 0.99}


# Of which a sample of a sixteenth tells little, or something wrong.
HARD = {
    "cauchy": lambda rng, n: rng.standard_t(1, n),
    "sorted": lambda rng, n: np.sort(rng.normal(size=n)),
    "few": lambda rng, n: rng.normal(size=n) * (rng.random(n) < 20 / n),
    "one": lambda rng, n: np.eye(1, n, 12_345)[0],
    "rows": lambda rng, n: rng.normal(size=n) * (np.arange(n) // 1024 % 97 == 3),
    "constant": lambda rng, n: np.full(n, -0.3),
    "two magnitudes": lambda rng, n: np.where(rng.random(n) < 0.01, 1, 2**-7),
    "outlier": lambda rng, n: np.where(np.arange(n) == 777, 1e6, rng.normal(size=n)),
}


@pytest.mark.parametrize("kind", HARD)
@every_scheme
def test_a_sample_does_not_mislead(scheme, kind):
    """What is chosen of a vector of which a sample is looked at first; and that its choice is what is sent."""
    g = HARD[kind](np.random.default_rng(1), 300_000).astype(np.float32)
    improvement, size, worst = cat.IMPROVEMENT[scheme](g), cat.expected_bytes(g, scheme), {}
    for cost in COSTS:
        result = encode(codec_of(scheme, cost), g)
        T, objective = chosen(scheme, g, result), improvement / COSTS[cost](size)
        worst[cost] = round(float(objective[T - 1] / np.nanmax(objective)), 5)
        if scheme != "stochastic" and (scheme, kind) != ("topk", "constant"):
            check_sent(scheme, g, result, T)
        elif scheme == "stochastic" and head(scheme, result.payload)[2] > 0:
            level, decoded = np.float32(head(scheme, result.payload)[2]), decode(codec_of(scheme, cost), result.payload, g.size)
            assert ((decoded == g) | ((np.abs(g) <= level) & np.isin(np.abs(decoded), [0, level]))).all()
    assert not {cost: ratio for cost, ratio in worst.items() if ratio < 0.99}


@pytest.mark.parametrize("fraction", [1e-5, 0.001, 0.1, 1])
@pytest.mark.parametrize("kind", [*HARD, "normal"])
def test_topk_of_large_ones_is_exact(kind, fraction):
    g = (HARD | DRAW)[kind](np.random.default_rng(2), 300_000).astype(np.float32)
    result = encode(parse(f"topk:fraction={fraction}"), g)
    expected = top(g, fraction)
    if kind == "constant" or kind == "two magnitudes":  # of equal ones any may be taken
        assert result.encoded.selected == np.count_nonzero(expected)
        assert np.array_equal(np.sort(decode(parse("topk"), result.payload, g.size)), np.sort(expected))
    else:
        assert np.array_equal(decode(parse("topk"), result.payload, g.size), expected)
    assert result.encoded.residual_norm == pytest.approx(np.linalg.norm((g - expected).astype(float)), rel=1e-4)


@pytest.mark.parametrize("zeros", [0, 20_000])
def test_not_unimodal(zeros):
    """One element is better than two, as the paper counts bits, and 4097 are the best."""
    g = np.float32([1] + [0.6] * 4096 + [0] * zeros)
    by_paper = cat.beta(g) / cat.paper_bits(np.arange(1, g.size + 1), g.size, 1)
    assert by_paper[0] > by_paper[1]
    assert np.argmax(by_paper) + 1 == 4097
    assert encode(codec_of("topk+sign", "cost=bits"), g).encoded.selected == 4097


@pytest.mark.parametrize("pmax", [40, 333, 1500])
@every_scheme
def test_packets_are_filled(scheme, pmax):
    filled = 0
    for kind in ("normal", "laplace", "t3"):
        g = coarse(draw(kind, 700)) if scheme == "stochastic" else draw(kind, 20_000)
        T = chosen(scheme, g, encode(codec_of(scheme, f"cost=packets,c0=1,pmax={pmax}"), g))
        if np.count_nonzero(g) > T:
            size = cat.expected_bytes(g, scheme)
            assert math.ceil(size[T] / pmax) == math.ceil(size[T - 1] / pmax) + 1
            filled += 1
    assert filled or pmax == 1500


@every_scheme
def test_measured_is_time_with_the_numbers_given(scheme):
    g, codec = draw("laplace", 30_000), codec_of(scheme, "cost=measured,error_feedback=false")
    out = np.empty(codec.max_payload(g.size), np.uint8)
    for latency, bandwidth in ((1e-6, 1e8), (1e-4, 1e9)):
        encoded = codec.encode(Vector.of(g), None, None, 0, Vector.of(out), measured=Measured(latency, 1 / bandwidth))
        expected = encode(codec_of(scheme, f"cost=time,latency={latency},bandwidth={bandwidth},error_feedback=false"), g)
        assert encoded == expected.encoded
        assert out[: encoded.bytes].tobytes() == expected.payload.tobytes()
    # To explore, a part of the elements is sent whatever it costs.
    encoded = codec.encode(Vector.of(g), None, None, 0, Vector.of(out), measured=Measured(1e-6, 1e-8, explore=0.0001))
    expected = 3 if scheme != "stochastic" else 3000
    assert encoded.selected == pytest.approx(expected, abs=0 if scheme != "stochastic" else 5 * expected**0.5)


def test_to_explore_does_no_harm_where_no_residual_is_kept():
    """The gradient that is made of what is sent is never much longer than the gradient."""
    g = draw("normal", 30_000)
    for spec in ("cat:scheme=stochastic", "nuqsgd:bits=auto", "qsgd:bits=auto"):
        codec, sizes = parse(spec), set()
        out = np.empty(codec.max_payload(g.size), np.uint8)
        for explore in (0.01, 0.001, 0.1, 0.0001):
            encoded = codec.encode(Vector.of(g), None, None, 0, Vector.of(out), measured=Measured(explore=explore))
            assert np.linalg.norm(decode(codec, out[: encoded.bytes], g.size)) <= 2.6 * np.linalg.norm(g)
            sizes.add(encoded.bytes)
        assert len(sizes) >= 3
        assert max(sizes) > 1.5 * min(sizes)


# --- what it does to a step


def test_stochastic_is_unbiased():
    rng = np.random.default_rng(3)
    g = (rng.choice([-1, 1], 200) * (0.05 + rng.exponential(size=200))).astype(np.float32)
    g[:3] = 20, -12, 9
    codec, seeds = codec_of("stochastic", "cost=bits"), 3000
    results = [encode(codec, g, seed=seed) for seed in range(seeds)]
    T, (values, _, level) = chosen("stochastic", g, results[0]), head("stochastic", results[0].payload)
    p = cat.water_fill(g, T)
    assert 0 < values < T < 100  # or there would be nothing to see
    sent = np.array([decode(codec, result.payload, g.size) for result in results], np.float64)
    error = np.abs(g) * np.sqrt((1 / p - 1) / seeds)
    assert (np.abs(sent.mean(0) - g) <= 5 * error + 1e-6).all()
    assert (sent[:, np.abs(g) > level] == g[np.abs(g) > level]).all()
    # The elements are drawn independently: so does their number vary.
    number = (sent != 0).sum(1)
    variance = np.sum(p * (1 - p))
    assert abs(number.mean() - T) <= 5 * (variance / seeds) ** 0.5
    assert number.var() == pytest.approx(variance, rel=5 * (2 / seeds) ** 0.5)
    squares, norm_sq = np.sum(sent**2, 1), np.sum(g.astype(float) ** 2)
    assert abs(squares.mean() - norm_sq / cat.omega(g)[T - 1]) <= 5 * level**2 * (variance / seeds) ** 0.5
    # On f(x) = |x|^2 / 2 a step of omega, which is the best there is, lowers f by omega |g|^2 / 2 on average.
    omega = results[0].encoded.improvement
    lowered = (norm_sq - np.sum((g - omega * sent) ** 2, 1)) / 2
    assert abs(lowered.mean() - omega * norm_sq / 2) <= 5 * lowered.std() / seeds**0.5


@pytest.mark.parametrize(("dtype", "within"), [(coarse, 1e-6), (np.float32, 1e-3)])  # of the part of a bin its mean is taken
@every_cost
@pytest.mark.parametrize("scheme", FEEDBACK)
def test_a_step_improves_a_quadratic_by_what_was_promised(scheme, cost, dtype, within):
    """f(x) = L/2 |x|^2, of which g = L x; a step of 1/L."""
    L = 8.0
    for kind in DRAW:
        g = dtype(draw(kind, 4000))
        result = encode(codec_of(scheme, cost), g)
        x = g.astype(np.float64) / L
        after = x - decode(codec_of(scheme, cost), result.payload, g.size) / L
        lowered = L / 2 * (np.sum(x**2) - np.sum(after**2))
        assert lowered == pytest.approx(result.encoded.improvement * np.sum(g.astype(float) ** 2) / (2 * L), rel=within)


# --- what is hard


@every_cost
@every_scheme
def test_nothing_one_and_all_the_same(scheme, cost):
    codec = codec_of(scheme, cost)
    for n in (0, 1, 2, 9, 5000):
        result = encode(codec, np.zeros(n, np.float32))
        assert result.encoded == Encoded(cat.HEAD_BYTES[scheme], 0, 0.0, True)
        assert not decode(codec, result.payload, n).any()
        one_hot, constant = np.float32(-0.7) * np.eye(1, n, n // 2, np.float32)[0], np.full(n, 0.3, np.float32)
        for g in (one_hot, constant) if n else ():
            result = encode(codec, g)
            if scheme == "topk" and g is constant:  # or not all arrive
                check_sent(scheme, g, result, result.encoded.selected)
                continue
            np.testing.assert_allclose(decode(codec, result.payload, n), g, rtol=1e-6)
            assert result.encoded.selected == np.count_nonzero(g)
            assert result.encoded.improvement == pytest.approx(1, rel=1e-5)


def test_as_many_equal_ones_as_a_large_layer_has():
    g = np.full(2**24, 0.5, np.float32)
    result = encode(codec_of("topk+sign", "cost=bits", ",error_feedback=false"), g)
    assert result.encoded.selected == g.size


@every_scheme
@pytest.mark.parametrize("cost", ["cost=bits", "cost=packets"])
def test_largest_numbers_stay_finite(scheme, cost):
    codec = codec_of(scheme, cost)
    for g in (np.float32([3e38] + [1e36] * 1199), np.full(1200, 3e38, np.float32)):
        assert np.isfinite(decode(codec, encode(codec, g).payload, g.size)).all()


# --- topk


def top(g, fraction):
    return cat.sent(g, "topk", min(max(1, math.floor(fraction * g.size + 0.5)), np.count_nonzero(g)))


AS = {
    "float32": lambda v: v,
    "float16": lambda v: v.astype(np.float16),
    "bfloat16": lambda v: (v.view(np.uint32) >> 16).astype(np.uint16),
    "float64": lambda v: v.astype(np.float64),
}


@pytest.mark.parametrize("fraction", [1e-6, 0.001, 0.01, 0.15, 0.5, 0.999])
@pytest.mark.parametrize("kind", DRAW)
@pytest.mark.parametrize("dtype", AS)
def test_topk_sends_the_largest(dtype, kind, fraction):
    codec = parse(f"topk:fraction={fraction}")
    v = draw(kind, 5003)
    v = coarse(v) if "b" in dtype else v.astype(dtype).astype(np.float32)  # with ties, of which the first are sent
    for g in (v, np.repeat(v[:500], 7)):
        result = encode(codec, AS[dtype](g))
        assert np.array_equal(decode(codec, result.payload, g.size), top(g, fraction))
        assert np.array_equal(result.residual, g - top(g, fraction))
        assert result.encoded.selected == np.count_nonzero(top(g, fraction))
        assert result.payload.size == cat.payload_bytes("topk", g.size, result.encoded.selected, 0)


@pytest.mark.parametrize("n", [1, 2, 127, 128, 129, 1023, 1024, 1025, 65535, 65536, 65537, 2**20 + 1])
@pytest.mark.parametrize("count", [1, 2, 10, 1000])
def test_topk_sends_a_count(count, n):
    codec = parse(f"topk:count={count}").for_shape((n,))
    g = draw("normal", n)
    g[[0, -1]] = 9  # the first and the last index
    result = encode(codec, g)
    assert result.encoded.selected == min(count, n)
    assert np.array_equal(decode(codec, result.payload, n), cat.sent(g, "topk", count))


def test_topk_loses_nothing():
    codec, rng = parse("topk:fraction=0.02"), np.random.default_rng(0)
    residual, sent, given = np.zeros(3000, np.float32), np.zeros(3000), np.zeros(3000)
    for _ in range(30):
        g = (rng.integers(-64, 65, 3000) / 64).astype(np.float32)  # whose sums are exact
        result = encode(codec, g, residual)
        decoded = decode(codec, result.payload, 3000)
        assert np.array_equal(decoded, top(g + residual, 0.02))
        residual, sent, given = result.residual, sent + decoded, given + g
    assert np.array_equal(sent + residual, given)
    assert np.array_equal(
        encode(parse("topk:fraction=0.02,error_feedback=false"), g + residual).payload, encode(codec, g, residual).payload
    )


def entropy_bits(n, k):
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


@pytest.mark.parametrize("n", [2, 9, 100, 1000, 4097, 100_000, 2**20])
def test_indices_are_short(n):
    every = np.arange(1, n) if n < 5000 else np.unique(np.geomspace(1, n - 1, 300).astype(int))
    for k in every:
        size = cat.index_bytes(n, k)
        assert size <= (n + 7) // 8
        if k < n / 4:  # two streams end in padding
            assert 8 * size <= entropy_bits(n, k) + (0.6 if k < n / 20 else 0.76) * k + 16
    g = draw("normal", n)
    for k in every[:: max(1, every.size // 50)]:
        codec = parse(f"topk:count={k}").for_shape((n,))
        assert encode(codec, g).payload.size == 8 + 4 * k + cat.index_bytes(n, k)


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.1, 1])
def test_typical_ratio_of_topk(fraction):
    codec, g = parse(f"topk:fraction={fraction}"), draw("normal", 2**20)
    assert codec.typical_ratio == pytest.approx(4 * g.size / encode(codec, g).payload.size, rel=0.02)


# --- randomk


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.3, 0.1, 0.01])
@pytest.mark.parametrize("n", [0, 1, 7, 1000, 1003])
@pytest.mark.parametrize("feedback", ["true", "false"])
def test_randomk_sends_one_of_each_stretch(n, fraction, feedback):
    codec, stretch = parse(f"randomk:fraction={fraction},error_feedback={feedback}"), round(1 / fraction)
    place = {}
    for seed in (1, 2):
        for g in (draw("normal", n, 3), draw("normal", n, 4)):
            result = encode(codec, g, seed=seed)
            decoded = decode(codec, result.payload, n)
            at = np.flatnonzero(decoded)
            assert np.array_equal(at // stretch, np.arange(math.ceil(n / stretch)))
            assert result.payload.size == 12 + 4 * at.size == codec.max_payload(n)
            assert np.array_equal(place.setdefault(seed, at), at)  # whatever the gradient is
            assert result.encoded.selected == at.size
            if feedback == "true":
                assert np.array_equal(decoded[at], g[at])
                assert np.array_equal(decoded + result.residual, g)
    if n >= 1000 and 0.01 < fraction < 1:
        assert not np.array_equal(place[1], place[2])


def test_randomk_is_unbiased_without_error_feedback():
    """The elements of the last stretch, which is short, too."""
    codec, g, seeds = parse("randomk:fraction=0.1,error_feedback=false"), draw("normal", 43), 4000
    mean = np.mean([decode(codec, encode(codec, g, seed=seed).payload, 43) for seed in range(seeds)], 0)
    length = np.where(np.arange(43) < 40, 10, 3)
    assert (np.abs(mean - g) <= 5 * np.abs(g) * np.sqrt((length - 1) / seeds)).all()


@pytest.mark.parametrize("feedback", ["true", "false"])
def test_randomk_of_a_mean_of_ranks_loses_nothing(feedback):
    codec, n = parse(f"randomk:fraction=0.05,error_feedback={feedback}"), 1003
    payloads = [encode(codec, draw("normal", n, rank), seed=7).payload for rank in range(3)]
    scratch, out = np.empty(n, np.float32), np.empty(codec.max_payload(n), np.uint8)
    left = np.full(n, 9, np.float32)
    residuals = [Vector.of(np.zeros(n, np.float32)), Vector.of(left)] if codec.has_residual else [None, None]
    vectors = [Vector.of(payload) for payload in payloads]
    encoded = codec.encode_again(vectors, 1 / 3, *residuals, 8, Vector.of(scratch), Vector.of(out))
    assert encoded.bytes == payloads[0].size
    assert np.array_equal(decode(codec, out, n), decode_sum(codec, payloads, n, 1 / 3))
    assert codec.shares_seed
    if codec.has_residual:
        assert not left.any()


# --- several segments


def encode_together(codec, grads, order=None, residual=0.0):
    """Encodes segments in a scope, added in some order; returns what add() did, the payloads, Encoded, and residuals."""
    scope, finite, left = codec.new_scope(), {}, [np.empty(g.size, np.float32) for g in grads]
    for i in order or range(len(grads)):
        before = np.full(grads[i].size, residual, np.float32)
        residuals = (Vector.of(before), Vector.of(left[i])) if codec.has_residual else (None, None)
        finite[i] = scope.add(i, Vector.of(grads[i]), *residuals)
    scope.choose()
    room = [np.empty(codec.max_payload(g.size), np.uint8) for g in grads]
    encoded = [scope.encode(i, 5 + i, Vector.of(out)) for i, out in enumerate(room)]
    payloads = [out[: each.bytes] for out, each in zip(room, encoded, strict=True)]
    return [finite[i] for i in range(len(grads))], payloads, encoded, left


def segments(dtype=coarse):
    """Of different magnitudes; the fourth is large enough to be counted by itself."""
    shapes = (("normal", 500, 1), ("t3", 3, 2), ("normal", 0, 1), ("laplace", 40_000, 0.25), ("zeros", 1001, 1))
    return [dtype(scale * draw(kind, n, seed=n)) for kind, n, scale in shapes]


def check_together(scheme, grads, payloads, encoded):
    """That segments were sent as if they were one; returns T."""
    together = np.concatenate(grads)
    heads = [head(scheme, payload) for payload in payloads]
    sent = [decode(codec_of(scheme, "cost=bits"), payload, g.size) for payload, g in zip(payloads, grads, strict=True)]
    level, T = heads[0][2], sum(each.selected for each in encoded)
    if scheme == "stochastic" and level > 0:
        T = round(sum(values for values, _, _ in heads) + np.abs(together)[np.abs(together) <= level].sum(dtype=float) / level)
        assert level == pytest.approx(cat.level(together, T), rel=1e-4)  # elements of the bin in which it is are values
        for g, each, (values, signs, _) in zip(grads, sent, heads, strict=True):
            large, expected = np.abs(g) > level, np.abs(g)[np.abs(g) <= level].sum() / level
            assert (each[large] == g[large]).all()
            assert ((each == 0) | (each == np.copysign(np.float32(level), g)))[~large].all()
            assert values == large.sum()
            assert abs(signs - expected) <= 5 * expected**0.5
    else:
        np.testing.assert_allclose(np.concatenate(sent), cat.sent(together, scheme.replace("stochastic", "topk"), T), rtol=1e-6)
    for payload, g, each, (values, signs, its_level) in zip(payloads, grads, encoded, heads, strict=True):
        assert its_level == level
        assert payload.size == cat.payload_bytes(scheme, g.size, values, signs)
        assert each.selected == values + signs
        assert each.energy == pytest.approx(np.sum(g.astype(float) ** 2), rel=1e-5)
        assert each.improvement == pytest.approx(cat.IMPROVEMENT[scheme](together)[T - 1], rel=1e-3)
    return T


@pytest.mark.parametrize("dtype", [coarse, np.float32])
@every_cost
@every_scheme
def test_segments_have_a_common_threshold(scheme, cost, dtype):
    codec, grads = codec_of(scheme, cost), segments(dtype)
    _, payloads, encoded, left = encode_together(codec, grads)
    T, together = check_together(scheme, grads, payloads, encoded), np.concatenate(grads)
    if codec.has_residual:
        np.testing.assert_allclose(np.concatenate(left), together - cat.sent(together, scheme, T), rtol=0, atol=1e-6)
    # As good as of one segment, but for the other heads.
    size = cat.expected_bytes(together, scheme) + (len(grads) - 1) * cat.HEAD_BYTES[scheme]
    objective = cat.IMPROVEMENT[scheme](together) / COSTS[cost](size)
    assert objective[T - 1] >= 0.99 * np.nanmax(objective)


@every_scheme
@pytest.mark.parametrize("more", ["", ",error_feedback=false"])
def test_the_order_in_which_segments_come_does_not_matter(scheme, more):
    codec = codec_of(scheme, "cost=time,latency=1e-6,bandwidth=1e8", more)
    one, other = (encode_together(codec, segments(np.float32), order, 0.125) for order in (None, [3, 0, 4, 2, 1]))
    assert [payload.tobytes() for payload in one[1]] == [payload.tobytes() for payload in other[1]]
    assert one[2] == other[2]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 3])
@every_scheme
def test_a_segment_that_is_not_finite_is_alone_with_it(scheme, at, bad):
    codec, grads = codec_of(scheme, "cost=time,latency=1e-6,bandwidth=1e8"), segments()
    grads[at][100] = bad
    finite, payloads, encoded, _ = encode_together(codec, grads)
    assert finite == [each.finite for each in encoded] == [i != at for i in range(len(grads))]
    assert np.isnan(decode(codec, payloads[at], grads[at].size)).all()
    check_together(scheme, *(each[:at] + each[at + 1 :] for each in (grads, payloads, encoded)))


# --- options

BAD = {
    "topk:fraction=0": ["fraction=0", "above 0", "1 at most"],
    "randomk:fraction=1.5": ["fraction=1.5", "above 0", "1 at most"],
    "topk:fraction=nan": ["fraction=nan", "above 0"],
    "topk:count=0": ["count=0", "1 to 4294967294"],
    "topk:count=2.5": ["count=2.5", "a whole number"],
    "topk:count=5,fraction=0.1": ["count=5", "a fraction or a count"],
    "randomk:error_feedback=1": ["error_feedback=1", "true or false"],
    "topk:count=5,error_feedback=1": ["error_feedback=1", "true or false"],
    "cat:scheme=best": ["scheme='best'", *map(repr, SCHEMES)],
    "cat:scope=layer": ["scope='layer'", "'bucket'", "'model'"],
    "cat:cost=money": ["cost='money'", "'measured'", "'bits'", "'packets'", "'time'"],
    "cat:scheme=stochastic,error_feedback=true": ["error_feedback=True", "false"],
    "cat:error_feedback=0": ["error_feedback=0", "true or false"],
    "cat:cost=packets,pmax=2.5": ["pmax=2.5", "a whole number from 1"],
    "cat:cost=packets,c0=-1": ["c0=-1", "from 0 on"],
    "cat:cost=packets,c1=inf": ["c1=inf", "from 0 on"],
    "cat:cost=packets,c0=0,c1=0": ["c1=0", "above 0"],
    "cat:cost=time,bandwidth=1": ["a latency in seconds", "a bandwidth in bytes a second"],
    "cat:cost=time,latency=1,bandwidth=0": ["bandwidth=0", "above 0"],
    "cat:cost=bits,latency=1": ["latency=1", "cost='time'"],
    "cat:c0=1": ["c0=1", "cost='packets'"],
}


@pytest.mark.parametrize(("spec", "words"), BAD.items())
def test_bad_options(spec, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the words are checked below
        parse(spec)
    for word in [*words, spec.partition(":")[0]]:
        assert word in str(caught.value)


@pytest.mark.parametrize("more", ["", ",scope=model", ",error_feedback=false"])
@every_cost
@every_scheme
def test_specs_print_back(scheme, cost, more):
    codec = codec_of(scheme, cost, more)
    assert parse(str(codec)) == codec
    assert codec.has_residual == (scheme in FEEDBACK and "false" not in more)


@pytest.mark.parametrize("options", ["", ":fraction=0.001", ":count=10", ":count=10,error_feedback=false", ":fraction=1"])
@pytest.mark.parametrize("name", ["topk", "randomk"])
def test_specs_of_the_others_print_back(name, options):
    codec = parse(name + options)
    assert parse(str(codec)) == codec
    assert codec.has_residual == ("false" not in options)
    if codec.count:
        assert codec.for_shape((25, 4)) == parse(f"{name}:fraction=0.1,error_feedback={str(codec.has_residual).lower()}")
        with pytest.raises(ValueError, match="for_shape"):
            codec.max_payload(100)
