"""CAT (Khirirat et al., arXiv 2003.06377, sections 3.1 to 3.3 and 4): what T elements bring, what they cost, and the best T.

Where an array is for all T, place T - 1 is for T. T counts no zeros: it goes up to the number of nonzeros, and then there is
only N, with which all is sent, and no index. What is between is NaN.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Cost = Callable[[Floats], Floats]

HEAD_BYTES = {"topk": 8, "topk+sign": 12, "stochastic": 16}
"""The checksum; how many values; how many signs, and what they stand for."""


def magnitudes(g: ArrayLike) -> Floats:
    """Return |g| from the largest down, (N,)."""
    return np.sort(np.abs(np.asarray(g, np.float64)))[::-1]


def counts(g: ArrayLike) -> Floats:
    """Return all T, (N,)."""
    every = np.arange(1.0, np.size(g) + 1)
    every[np.count_nonzero(g) : -1] = np.nan
    return every


def alpha(g: ArrayLike) -> Floats:
    """Return ||g_T||_2^2 / ||g||_2^2 for all T, (N,)."""
    sums = np.cumsum(magnitudes(g) ** 2)
    return sums / sums[-1]


def beta(g: ArrayLike) -> Floats:
    """Return (||g_T||_1 / ||g||_2)^2 / T for all T, (N,)."""
    a = magnitudes(g)
    return np.cumsum(a) ** 2 / np.sum(a**2) / np.arange(1, a.size + 1)


def water_fill(g: ArrayLike, T: int) -> Floats:
    """Return the probabilities of the elements, (N,): their sum is T, which is at most the number of nonzeros."""
    a = magnitudes(g)
    k = next(k for k in range(T) if a[k] * (T - k) <= np.sum(a[k:]) * (1 + 1e-12))  # equal ones do not add up exactly
    return np.minimum(1.0, np.abs(np.asarray(g, np.float64)) * (T - k) / np.sum(a[k:]))


def saturated(g: ArrayLike) -> Floats:
    """Return k for all T, (N,): so many elements are larger than the level, and sent as they are; all where T is N."""
    every, a = counts(g), magnitudes(g)
    a = a[a > 0]
    # Element k + 1 has a probability of 1 at most as long as T <= k + (the sum from it on) / (itself), which grows with k.
    bounds = np.arange(a.size) + np.cumsum(a[::-1])[::-1] / a
    k = np.searchsorted(bounds * (1 + 1e-12), every).astype(float)
    return np.where(every > a.size, every, k + 0 * every)


def level(g: ArrayLike, T: int) -> float:
    """Return |g_j| / p_j of the elements that are not sent as they are."""
    k = int(saturated(g)[T - 1])
    return float(magnitudes(g)[k:].sum() / (T - k))


def omega(g: ArrayLike) -> Floats:
    """Return ||g||_2^2 / sum(g_j^2 / p_j) for all T, (N,)."""
    every, a, k = counts(g), magnitudes(g), saturated(g)
    at = np.nan_to_num(k).astype(int)
    squares, sums = (np.concatenate([[0], np.cumsum(a**power)]) for power in (2, 1))
    return squares[-1] / (squares[at] + (sums[-1] - sums[at]) ** 2 / np.maximum(every - k, 1))


IMPROVEMENT = {"topk": alpha, "topk+sign": beta, "stochastic": omega}


def paper_bits(T: ArrayLike, n: int, value_bits: int = 32) -> Floats:
    """Return P(T): indices of ceil(log2 n) bits, and values; signs, of 1 bit, have 32 bits more that they share."""
    return np.asarray(T) * (np.ceil(np.log2(n)) + value_bits) + (32 if value_bits == 1 else 0)


@lru_cache
def _index_sizes(n: int) -> NDArray[np.int64]:
    count = np.arange(n + 1)
    sizes = np.full(n + 1, (n + 7) // 8)
    for width in range(n.bit_length() + 1):
        sizes = np.minimum(sizes, (count * width + 7) // 8 + (count + (max(n - 1, 0) >> width) + 7) // 8)
    sizes[[0, n]] = 0
    return sizes


def index_bytes(n: int, count: ArrayLike) -> NDArray[np.int64]:
    """Return the bytes that say which `count` of n elements: of all or none nothing, else a bitmap or the best Elias-Fano."""
    return _index_sizes(n)[np.asarray(count, int)]


def payload_bytes(scheme: str, n: int, values: ArrayLike, signs: ArrayLike) -> NDArray[np.int64]:
    """Return the bytes of a payload with so many elements of each kind."""
    values, signs = np.asarray(values, int), np.asarray(signs, int)
    return HEAD_BYTES[scheme] + index_bytes(n, values) + 4 * values + index_bytes(n, signs) + (signs + 7) // 8


def expected_bytes(g: ArrayLike, scheme: str) -> Floats:
    """Return the bytes of the payload for all T, (N,); where elements are drawn, as if they were T."""
    every, n, nonzeros = counts(g), np.size(g), np.count_nonzero(g)
    values = {"topk": every, "topk+sign": 0 * every, "stochastic": saturated(g)}[scheme]
    size = np.where(np.isnan(every), np.nan, payload_bytes(scheme, n, np.nan_to_num(values), np.nan_to_num(every - values)))
    if scheme == "stochastic" and nonzeros:  # none of which is drawn: all may be values
        size[nonzeros - 1] = min(size[nonzeros - 1], payload_bytes(scheme, n, nonzeros, 0))
    return size


def bits() -> Cost:
    """Return the cost by the bits of a payload."""
    return lambda size: 8 * size


def packets(c0: float = 0, c1: float = 1, pmax: int = 1500) -> Cost:
    """Return the cost by the packets of a payload."""
    return lambda size: c0 + c1 * np.ceil(size / pmax)


def time(latency: float, bandwidth: float) -> Cost:
    """Return the cost by the time of an exchange."""
    return lambda size: latency + size / bandwidth


def objective(g: ArrayLike, scheme: str, cost: Cost) -> Floats:
    """Return the improvement over the cost for all T, (N,)."""
    return IMPROVEMENT[scheme](g) / cost(expected_bytes(g, scheme))


def best(g: ArrayLike, scheme: str, cost: Cost) -> int:
    """Return the T with the largest objective, of all: it can have several maxima."""
    return int(np.nanargmax(objective(g, scheme, cost))) + 1


def sent(g: ArrayLike, scheme: str, T: int) -> Floats:
    """Return what topk and topk+sign send of g, (N,): the T largest, of equal ones the first; sign(0) is 1."""
    g = np.asarray(g, np.float64)
    chosen = np.argsort(-np.abs(g), kind="stable")[:T]
    result = np.zeros(g.size)
    result[chosen] = g[chosen] if scheme == "topk" else np.where(g[chosen] < 0, -1, 1) * np.abs(g[chosen]).mean()
    return result
