"""Elias omega codes and the sparse wire form of QSGD and NUQSGD that the papers describe."""

import struct

import numpy as np
from numpy.typing import ArrayLike


def omega(n: int) -> str:
    """Return the Elias omega code of n >= 1 as zeros and ones.

    From a final 0, prepend n in binary and go on with n = (length of that) - 1, until n = 1.
    """
    if n < 1:
        raise ValueError(f"no omega code for {n}")
    code = "0"
    while n > 1:
        binary = f"{n:b}"
        code = binary + code
        n = len(binary) - 1
    return code


def pack(codes: ArrayLike, norms: ArrayLike, bucket: int, negative: ArrayLike) -> bytes:
    """Pack signed level numbers into one bit string for the whole vector.

    Per bucket: the 32 bits of the float32 norm, high bit first; omega(nonzeros + 1); then for each nonzero
    omega(distance from the nonzero before it in the bucket, the first counted from position -1), one sign bit
    (1 = negative), omega(level). Bits fill each byte from the high bit down; zeros pad the end to a byte.

    Args:
        codes: signed level numbers, (N,).
        norms: one a bucket, (ceil(N / bucket),).
        bucket: values that share a norm.
        negative: the signs of the values, (N,) of bool.
    """
    codes = np.asarray(codes, dtype=np.int64)
    negative = np.asarray(negative, dtype=bool)
    bits = []
    for number, scale in enumerate(np.asarray(norms, dtype=np.float32)):
        start = number * bucket
        nonzeros = np.flatnonzero(codes[start : start + bucket])
        bits.append("".join(f"{byte:08b}" for byte in struct.pack(">f", scale)))
        bits.append(omega(nonzeros.size + 1))
        previous = -1
        for i in nonzeros.tolist():
            bits += [omega(i - previous), "1" if negative[start + i] else "0", omega(abs(int(codes[start + i])))]
            previous = i
    string = "".join(bits)
    string += "0" * (-len(string) % 8)
    return bytes(int(string[i : i + 8], 2) for i in range(0, len(string), 8))
