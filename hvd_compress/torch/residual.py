"""What encoding has lost of a vector, and what that was before, for a step that has to be taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from hvd_compress.torch.memory import vector
from hvd_compress.vector import Vector

Result = TypeVar("Result")


class Residual:
    """Float32, flat; no vector at all before the first encoding.

    Attributes:
        value: The residual; None where there is none (yet).
        sq: Its squared L2 norm.
        round: The last round that encoded the vector.
    """

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None
        self.sq = 0.0
        self.round: object = None
        self._before: tuple[torch.Tensor | None, float] = (None, 0.0)  # value and norm before the last encoding
        self._spare: torch.Tensor | None = None  # memory for the next residual

    def replace(self, n: int, run: Callable[[Vector, Vector], Result]) -> Result:
        """Calls ``run(residual_in, residual_out)``, which encodes, and keeps what it leaves; `sq` is still to be set."""
        old = self.value if self.value is not None else torch.zeros(n)
        new = self._spare if self._spare is not None else torch.empty(n)
        result = run(vector(old), vector(new))
        self._before = (old, self.sq)
        self.value, self._spare = new, old
        return result

    def take(self) -> torch.Tensor | None:
        """The residual, to be sent: afterwards there is none."""
        self.keep()
        taken, self.value, self.sq, self._spare = self.value, None, 0.0, None
        return taken

    def keep(self) -> None:
        """Stands for an `encode` that leaves the residual as it is."""
        self._before = (self.value, self.sq)

    def undo(self) -> None:
        """Takes the last `encode`, `take` or `keep` back."""
        before, self.sq = self._before
        if before is not self.value:
            self.value, self._spare = before, self.value

    @property
    def before(self) -> torch.Tensor | None:
        """What `undo` would make of it."""
        return self._before[0]

    @property
    def exists(self) -> bool:
        """Whether there is one, or was before the last encoding."""
        return self.value is not None or self.before is not None

    def add(self, other: Residual, factor: float, n: int, where: tuple[int, int]) -> None:
        """Adds `factor` times another one to elements `where` of this one, which has n; it can be undone as before."""
        value, before = (
            _sum(mine, factor, its, n, where) for mine, its in ((self.value, other.value), (self.before, other.before))
        )
        self.set(before)
        self._before = (before, self.sq)
        self.value, self.sq = value, _square(value)

    def scale(self, factor: float) -> None:
        """Multiplies it."""
        if self.value is not None:
            self.value.mul_(factor)
            self.sq *= factor**2

    def set(self, value: torch.Tensor | None) -> None:
        """Replaces it, by memory that is then its own, or by none; what was before is forgotten."""
        self.value, self._spare = value, None
        self.sq = _square(value)
        self.keep()


def _square(value: torch.Tensor | None) -> float:
    return 0.0 if value is None else float(torch.linalg.vector_norm(value, dtype=torch.float64)) ** 2


def _sum(mine: torch.Tensor | None, factor: float, its: torch.Tensor | None, n: int, where: tuple[int, int]) -> torch.Tensor:
    total = torch.zeros(n) if mine is None else mine.clone()
    if its is not None:
        total[slice(*where)] += factor * its
    return total
