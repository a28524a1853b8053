"""QSGD, QSGDinf (Alistarh et al., arXiv 1610.02132) and NUQSGD (Ramezani-Kebrya et al., arXiv 1908.06077).

A vector v of N values is cut into B = ceil(N / bucket) buckets, the last one short. `kind` is "qsgd", "qsgdinf" or
"nuqsgd"; `bits` is the width of a code, one bit of it for the sign.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

KINDS = ("qsgd", "qsgdinf", "nuqsgd")


def _check(kind: str, bits: int = 2) -> None:
    if kind not in KINDS or not 2 <= bits <= 8:
        raise ValueError(f"no quantizer {kind!r} with {bits} bits")


def levels(kind: str, bits: int) -> Floats:
    """Return the 2^(bits-1) levels, ascending, from 0 to 1.

    QSGD and QSGDinf: k/s, k = 0..s, s = 2^(bits-1) - 1. NUQSGD: 0, 2^-s, ..., 1/2, 1, s = 2^(bits-1) - 2.
    """
    _check(kind, bits)
    if kind == "nuqsgd":
        s = 2 ** (bits - 1) - 2
        return np.array([0.0] + [2.0**-k for k in range(s, -1, -1)])
    s = 2 ** (bits - 1) - 1
    return np.arange(s + 1) / s


def norm(kind: str, v: ArrayLike) -> float:
    """Return the scale of one bucket: max |v| for QSGDinf, else ||v||_2."""
    _check(kind)
    v = np.asarray(v, dtype=np.float64)
    if kind == "qsgdinf":
        return float(np.abs(v).max(initial=0.0))
    return float(np.sqrt(np.sum(v * v)))


def _ratios(kind: str, v: ArrayLike, bucket: int) -> tuple[Floats, Floats]:
    """Return r = |v_i| / norm of its bucket (0 in a zero bucket), (N,), and the norms, (B,)."""
    v = np.asarray(v, dtype=np.float64)
    norms = np.array([norm(kind, v[start : start + bucket]) for start in range(0, v.size, bucket)], dtype=np.float64)
    own = norms[np.arange(v.size) // bucket]
    ratios = np.divide(np.abs(v), own, out=np.zeros_like(v), where=own > 0)
    return np.minimum(ratios, 1.0), norms


def _neighbours(table: Floats, ratios: Floats) -> tuple[Ints, Ints]:
    """Return the numbers of the levels l <= r < u; for r = 1 both are the top level."""
    lower = np.searchsorted(table, ratios, side="right") - 1
    return lower, np.minimum(lower + 1, table.size - 1)


def round_buckets(kind: str, v: ArrayLike, bits: int, bucket: int, uniform: ArrayLike) -> tuple[Ints, Floats]:
    """Round each r = |v_i| / norm at random to a neighbour l <= r < u.

    Up iff uniform_i < (r - l) / (u - l), so that E Q = v. A value on a level stays; a zero bucket gives zeros.

    Args:
        kind: which quantizer.
        v: (N,).
        bits: width of a code, 2 to 8.
        bucket: values that share a norm.
        uniform: the random numbers, in [0, 1), (N,).

    Returns:
        Signed level numbers, sign(v_i) * index into `levels`, (N,), and the norms, (B,).
    """
    table = levels(kind, bits)
    ratios, norms = _ratios(kind, v, bucket)
    lower, upper = _neighbours(table, ratios)
    gap = np.where(upper > lower, table[upper] - table[lower], 1.0)
    up = np.asarray(uniform, dtype=np.float64) < (ratios - table[lower]) / gap
    codes = np.where(up, upper, lower) * np.sign(np.asarray(v, dtype=np.float64))
    return codes.astype(np.int64), norms


def values(kind: str, codes: ArrayLike, norms: ArrayLike, bits: int, bucket: int) -> Floats:
    """Decode: Q_i = sign(code_i) * levels[|code_i|] * norm of its bucket, (N,)."""
    codes = np.asarray(codes, dtype=np.int64)
    own = np.asarray(norms, dtype=np.float64)[np.arange(codes.size) // bucket]
    return np.sign(codes) * levels(kind, bits)[np.abs(codes)] * own


def conditional_variance(kind: str, v: ArrayLike, bits: int, bucket: int) -> float:
    """Return E||Q - v||^2 = sum over buckets of norm^2 * sum_i (r_i - l)(u - r_i), exactly."""
    table = levels(kind, bits)
    ratios, norms = _ratios(kind, v, bucket)
    lower, upper = _neighbours(table, ratios)
    own = norms[np.arange(ratios.size) // bucket]
    return float(np.sum(own**2 * (ratios - table[lower]) * (table[upper] - ratios)))


def variance_bound(kind: str, bits: int, d: int) -> float:
    """Return eps with E||Q - v||^2 <= eps ||v||^2 for every bucket of d values.

    QSGD and QSGDinf: min(d / 4s^2, sqrt(d) / s). NUQSGD, with L = 2^-s sqrt(d): 1/8 + (2/9) L^2 where L <= 9/4, else
    L - 1.
    """
    _check(kind, bits)
    if kind == "nuqsgd":
        length = 2.0 ** -(2 ** (bits - 1) - 2) * math.sqrt(d)
        return 1 / 8 + 2 / 9 * length**2 if length <= 9 / 4 else length - 1
    s = 2 ** (bits - 1) - 1
    return min(d / (4 * s**2), math.sqrt(d) / s)


def expected_nonzeros(kind: str, v: ArrayLike, bits: int, bucket: int) -> float:
    """Return E nnz(Q) = sum_i min(1, r_i / l_1), l_1 the lowest level above 0 (2^-s or 1/s)."""
    ratios, _ = _ratios(kind, v, bucket)
    return float(np.sum(np.minimum(1.0, ratios / levels(kind, bits)[1])))


def _bit_string(codes: Ints, bits: int) -> NDArray[np.uint8]:
    """Join codes along the last axis from the low bit up: (..., n) -> zeros and ones, (..., n * bits)."""
    ones = (codes[..., None] >> np.arange(bits)) & 1
    return ones.reshape(*codes.shape[:-1], -1).astype(np.uint8)


def _pack_lanes(codes: Ints, bits: int, lanes: int) -> bytes:
    """Pack 32 * lanes codes: code lanes*k+j is the k-th of lane j; word w of lane j is stored at lanes*w+j."""
    by_lane = codes.reshape(32, lanes).T
    lane_bytes = np.packbits(_bit_string(by_lane, bits), axis=-1, bitorder="little")
    words = lane_bytes.reshape(lanes, bits, 4)
    return words.transpose(1, 0, 2).tobytes()


def _pack_tile(codes: Ints, bits: int) -> bytes:
    """Pack up to 512 codes into ceil(m * bits / 8) bytes."""
    if codes.size == 512:
        return _pack_lanes(codes, bits, 16)
    whole = codes.size // 128 * 128
    packed = b"".join(_pack_lanes(codes[start : start + 128], bits, 4) for start in range(0, whole, 128))
    return packed + np.packbits(_bit_string(codes[whole:], bits), bitorder="little").tobytes()


def pack_fixed(codes: ArrayLike, norms: ArrayLike, bits: int, bucket: int, negative: ArrayLike) -> bytes:
    """Fixed-width little-endian wire form: for each bucket its float32 norm, then its codes in tiles of 512.

    A code is level | sign << (bits - 1), sign = 1 where the value is negative. A tile of 512 is packed in 16 lanes; a
    shorter one as groups of 128 in 4 lanes and then a plain bit string from the low bit up, zero-padded to a byte.

    Args:
        codes: signed level numbers, (N,).
        norms: (B,).
        bits: width of a code.
        bucket: values that share a norm.
        negative: the signs of the values, level 0 included, (N,) of bool.
    """
    signs = np.asarray(negative, dtype=np.int64)
    words = np.abs(np.asarray(codes, dtype=np.int64)) | signs << (bits - 1)
    out = b""
    for number, scale in enumerate(np.asarray(norms, dtype="<f4")):
        own = words[number * bucket : (number + 1) * bucket]
        out += scale.tobytes() + b"".join(_pack_tile(own[i : i + 512], bits) for i in range(0, own.size, 512))
    return out
