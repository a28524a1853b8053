"""EF-signSGD (Karimireddy et al., arXiv 1901.09847) and APMSqueeze's C (Tang et al., arXiv 2008.11343, section 3)."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def scale(u: ArrayLike, kind: str) -> float:
    """Return what a sign stands for: mean |u| for "l1", ||u||_2 / sqrt(N) for "l2"; 0 for no elements."""
    u = np.asarray(u, dtype=np.float64)
    if u.size == 0:
        return 0.0
    if kind == "l1":
        return float(np.abs(u).mean())
    return float(np.linalg.norm(u) / np.sqrt(u.size))


def compress(u: ArrayLike, kind: str) -> Floats:
    """Return C(u) = sign(u) * scale with sign(0) = +1, (N,)."""
    u = np.asarray(u, dtype=np.float64)
    return np.where(u < 0, -1.0, 1.0) * scale(u, kind)


def payload_body(u: ArrayLike, kind: str) -> bytes:
    """Return the payload without its checksum: the float32 scale, and a bit for each element, 1 where it is negative."""
    bits = np.packbits(np.asarray(u) < 0, bitorder="little")
    return np.float32(scale(u, kind)).astype("<f4").tobytes() + bits.tobytes()
