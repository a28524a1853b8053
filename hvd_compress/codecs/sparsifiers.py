"""Sparsification: the largest elements, random ones, and CAT (Khirirat et al., arXiv 2003.06377), which chooses how many."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from hvd_compress import _kernels
from hvd_compress.codecs.base import LARGE, Codec
from hvd_compress.codecs.cost import Costed

DEFAULT_FRACTION = 0.01
INDEX_BITS = 1.95
"""What an index takes of a fraction of the elements, beyond the logarithm of one over the fraction: see csrc/indices.h."""


@dataclasses.dataclass(frozen=True)
class _Sparsifier(Codec):
    """Sends a part of a parameter's elements; what it does not send stays in the residual."""

    fraction: float | None = None
    """Of the elements of each parameter: above 0, 1 at most; default 0.01. At least one is sent."""
    count: int | None = None
    """Instead of a fraction: so many elements of each parameter, all where it has fewer."""
    error_feedback: bool = True
    """Keep what was not sent and add it to the next gradient."""

    optional: ClassVar[frozenset[str]] = frozenset({"error_feedback"})

    def __post_init__(self) -> None:
        if self.count is not None:
            if self.fraction is not None:
                raise self._refuse("count", "a fraction or a count, not both")
            self._check_integer("count", 1, 2**32 - 2)
        else:
            fraction = DEFAULT_FRACTION if self.fraction is None else self.fraction
            if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
                raise self._refuse("fraction", "a number above 0, and 1 at most")
            object.__setattr__(self, "fraction", float(fraction))
        if not isinstance(self.error_feedback, bool):
            raise self._refuse("error_feedback", "true or false")

    @property
    def has_residual(self) -> bool:
        """Under error feedback."""
        return self.error_feedback

    def for_shape(self, shape: Sequence[int]) -> _Sparsifier:
        """A count is turned into a fraction, so that a piece of the parameter has its part of it."""
        if self.count is None:
            return self
        return dataclasses.replace(self, count=None, fraction=min(1.0, self.count / max(1, math.prod(shape))))

    def _fraction(self) -> float:
        if self.fraction is None:
            raise ValueError(f"{self}: for_shape() makes a fraction of the count, for a parameter's shape")
        return self.fraction


@dataclasses.dataclass(frozen=True)
class TopK(_Sparsifier):
    """The elements of largest magnitude, as they are; of equal ones the first.

    Zeros, and what is below 2^-133, are sent only where all are.

    Payload: checksum (4 bytes), uint32 number, their indices (see csrc/indices.h), the elements as float32.

    Raises:
        ValueError: An option is out of range.
    """

    name: ClassVar[str] = "topk"

    @property
    def is_sparse(self) -> bool:
        """Other elements on every rank."""
        return True

    @property
    def typical_ratio(self) -> float:
        """By the entropy of the indices."""
        return _ratio(DEFAULT_FRACTION if self.fraction is None else self.fraction)

    def kernel_options(self) -> dict[str, Any]:
        """What the kernels need to know of it."""
        return {"fraction": self._fraction()}


@dataclasses.dataclass(frozen=True)
class RandomK(_Sparsifier):
    """Of every 1 / fraction consecutive elements, one at random; the same ones on every rank, so that no index is sent and the
    mean is as sparse as what one rank sends. Without error feedback an element is sent 1 / fraction times as large: unbiased.

    Payload: checksum (4 bytes), the seed (8 bytes), the elements as float32.

    Raises:
        ValueError: An option is out of range.
    """  # noqa: D205

    name: ClassVar[str] = "randomk"

    def kernel_options(self) -> dict[str, Any]:
        """What the kernels need to know of it."""
        return {"bin": max(1, round(1 / self._fraction())), "feedback": self.error_feedback}

    @property
    def typical_ratio(self) -> float:
        """Of a fraction."""
        return 1 / (DEFAULT_FRACTION if self.fraction is None else self.fraction)


@dataclasses.dataclass(frozen=True)
class CAT(Costed):
    """Communication-aware sparsification: of each gradient so many elements T that Improvement(T) / cost is largest, where
    Improvement is the part of the gradient's energy, or of the expected decrease of a smooth loss, that T elements bring
    (sections 3.1 to 3.3 of the paper).

    With ``cost="bits"`` that is a handful of elements, since the first ones bring most: a payload alone, without the time that
    sending takes at all, is not what a network costs.

    Payload: checksum (4 bytes); where values are sent uint32 how many; where signs are sent uint32 how many and float32 what
    they stand for; the indices of the values, the values as float32, the indices of the signs, a bit for each sign.

    Raises:
        ValueError: An option is out of range.
    """  # noqa: D205

    scheme: str = "topk"
    """"topk": the T largest, as they are. "topk+sign": their signs and their mean magnitude. "stochastic": each element with a
    probability in proportion to its magnitude, unbiased."""
    scope: str = "bucket"
    """What T is chosen for: "bucket", all that travels in one message, while backward runs; or "model", all of it."""
    error_feedback: bool | None = None
    """Keep what was not sent and add it to the next gradient. Default: true, but for "stochastic", which has none. The paper
    has none at all."""

    name: ClassVar[str] = "cat"

    def __post_init__(self) -> None:
        if self.scheme not in _kernels.Scheme.__members__:
            raise self._refuse("scheme", ", ".join(repr(scheme) for scheme in _kernels.Scheme.__members__))
        if self.scope not in ("bucket", "model"):
            raise self._refuse("scope", "'bucket' or 'model'")
        self._check_cost()
        stochastic = self.scheme == "stochastic"
        if self.error_feedback is None:
            object.__setattr__(self, "error_feedback", not stochastic)
        if not isinstance(self.error_feedback, bool) or (stochastic and self.error_feedback):
            raise self._refuse("error_feedback", "false: it is unbiased, and would diverge" if stochastic else "true or false")

    @property
    def has_residual(self) -> bool:
        """Under error feedback."""
        return bool(self.error_feedback)

    @property
    def is_sparse(self) -> bool:
        """Usually."""
        return True

    @property
    def is_joint(self) -> bool:
        """T is chosen for several parameters."""
        return True

    @property
    def is_of_model(self) -> bool:
        """T is chosen for the whole model."""
        return self.scope == "model"

    @property
    def typical_ratio(self) -> float:
        """Where 1 % of the elements are sent, which nobody knows before."""
        return _ratio(DEFAULT_FRACTION, 32 if self.scheme == "topk" else 1)

    def kernel_options(self) -> dict[str, Any]:
        """What the kernels need to know of it."""
        return {"scheme": getattr(_kernels.Scheme, self.scheme), "joint": True, **self.cost_options()}


def _ratio(fraction: float, value_bits: int = 32) -> float:
    index_bits = min(1 / fraction, math.log2(1 / fraction) + INDEX_BITS) if fraction < 1 else 0
    return 32 * LARGE / (max(1.0, fraction * LARGE) * (value_bits + index_bits))
