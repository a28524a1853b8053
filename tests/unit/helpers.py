"""Codecs over NumPy arrays, with guarded memory around what they write."""

from typing import NamedTuple

import numpy as np

from hvd_compress import _kernels
from hvd_compress.codecs import Codec, Encoded
from hvd_compress.vector import Vector

GUARD = 64
"""Elements on each side of an output that must stay as they are."""
CANARY = 0xA5


class Result(NamedTuple):
    payload: np.ndarray
    encoded: Encoded
    residual: np.ndarray | None


def guarded(n: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The whole memory, filled with canaries, and the `n` elements in its middle."""
    memory = np.empty(n + 2 * GUARD, dtype)
    memory.view(np.uint8)[:] = CANARY
    return memory, memory[GUARD : GUARD + n]


def guards_hold(memory: np.ndarray) -> bool:
    return all(np.all(side.view(np.uint8) == CANARY) for side in (memory[:GUARD], memory[memory.size - GUARD :]))


def vector(array: np.ndarray) -> Vector:
    """An array's memory; uint16 is bfloat16."""
    return Vector.of(array)._replace(dtype="bfloat16") if array.dtype == np.uint16 else Vector.of(array)


def encode(codec: Codec, grad: np.ndarray, residual: np.ndarray | None = None, seed: int = 0) -> Result:
    """Encodes; where the codec has a residual and none is given, it is zero."""
    n, grad = grad.size, grad.copy()  # which ends where its memory does, for an address sanitizer to see
    memory, out = guarded(codec.max_payload(n), "uint8")
    before = after = None
    left_memory, left = guarded(n, "float32")
    if codec.has_residual:
        residual = np.zeros(n, np.float32) if residual is None else residual
        before, after = Vector.of(residual), Vector.of(left)
    encoded = codec.encode(vector(grad), before, after, seed, Vector.of(out))
    assert encoded.bytes <= out.size
    assert guards_hold(memory)
    assert guards_hold(left_memory)
    return Result(out[: encoded.bytes].copy(), encoded, left.copy() if codec.has_residual else None)


def add(codec: Codec, payload: np.ndarray, out: np.ndarray, weight: float = 1.0) -> None:
    """Adds to `out` (float32), as `Codec.decode_add`, and checks that nothing around it changes, even where it raises."""
    payload = payload.copy()
    memory, middle = guarded(out.size, "float32")
    middle[:] = out
    try:
        codec.decode_add(Vector.of(payload), weight, Vector.of(middle))
    finally:
        assert guards_hold(memory)
        out[:] = middle


def decode(codec: Codec, payload: np.ndarray, n: int, weight: float = 1.0) -> np.ndarray:
    return decode_sum(codec, [payload], n, weight)


def decode_sum(codec: Codec, payloads: list[np.ndarray], n: int, weight: float = 1.0) -> np.ndarray:
    """As `Codec.decode`, into memory full of garbage; checks that nothing around it changes."""
    memory, middle = guarded(n, "float32")
    try:
        codec.decode([Vector.of(payload.copy()) for payload in payloads], weight, Vector.of(middle))
    finally:
        assert guards_hold(memory)
    return middle.copy()


def sealed(body: bytes | np.ndarray) -> np.ndarray:
    """A payload with this body behind a checksum that is right."""
    content = np.frombuffer(bytes(body), np.uint8)
    seal = np.uint32(_kernels.checksum(content.ctypes.data, content.size))
    return np.concatenate([np.array([seal], "<u4").view(np.uint8), content])


def ratio_of(payload: np.ndarray, n: int) -> float:
    return 4 * n / payload.size
