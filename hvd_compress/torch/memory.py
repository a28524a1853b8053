"""Tensors as the kernels see them."""

from __future__ import annotations

import torch

from hvd_compress.vector import DTYPES, Vector

_NAMES = {getattr(torch, name): name for name in DTYPES}


def vector(tensor: torch.Tensor) -> Vector:
    """The memory of a contiguous CPU tensor."""
    return Vector(tensor.data_ptr(), _NAMES[tensor.dtype], tensor.numel(), tensor)


def sample(flat: torch.Tensor) -> torch.Tensor:
    """A few elements, spread over a flat vector: its version would not tell of a change, GradScaler does not count it up."""
    return flat[:: max(1, flat.numel() // 16)]


class Scratch:
    """Memory for one vector of floats at a time, which is kept."""

    def __init__(self) -> None:
        self._floats = torch.empty(0)

    def floats(self, n: int) -> Vector:
        """Room for `n` float32."""
        if self._floats.numel() < n:
            self._floats = torch.empty(n)
        return vector(self._floats[:n])
