"""A flat vector in memory, whichever library owns it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "uint8": 1}
"""The dtypes that a vector can have, with their bytes an element."""


class Vector(NamedTuple):
    """Contiguous memory.

    Attributes:
        address: Of the first element.
        dtype: A key of `DTYPES`.
        length: In elements.
        owner: What the memory belongs to; kept alive as long as the vector.
    """

    address: int
    dtype: str
    length: int
    owner: Any

    @classmethod
    def of(cls, array: np.ndarray) -> Vector:
        """The memory of a contiguous NumPy array; its dtype must be one of `DTYPES` (bfloat16 by ml_dtypes' name)."""
        if not array.flags.c_contiguous:
            raise ValueError("a vector is contiguous, this array is not")
        return cls(array.ctypes.data, array.dtype.name, array.size, array)

    def slice(self, start: int, length: int) -> Vector:
        """`length` elements from `start` on."""
        if start < 0 or length < 0 or start + length > self.length:
            raise ValueError(f"elements {start} to {start + length} of a vector of {self.length}")
        return Vector(self.address + start * DTYPES[self.dtype], self.dtype, length, self.owner)
