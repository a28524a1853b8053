"""QSGD, QSGDinf (Alistarh et al., NeurIPS 2017, arXiv 1610.02132) and NUQSGD (Ramezani-Kebrya et al., JMLR 2021)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np

from hvd_compress import _kernels
from hvd_compress.codecs.cost import Costed
from hvd_compress.vector import Vector

MAX_BUCKET = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class _Quantizer(Costed):
    """Each bucket of values is divided by its norm and rounded at random, without bias, to one of a few levels.

    Payload: with ``bits="auto"`` the bits, as each of four bytes; checksum (4 bytes); with ``coding="fixed"``, per bucket a
    float32 norm and `bits` bits an element, the sign included; with ``coding="elias"``, one bit stream, per bucket 32 bits of
    norm, the number of nonzeros, and for each its distance from the one before, its sign and its level, in Elias omega codes.

    Raises:
        ValueError: An option is out of range.
    """

    bits: int | str = 4
    """Bits an element, one of them the sign: 2 to 8. "auto": chosen at every step, for the largest improvement over cost
    (`Costed`, which says what the other options mean)."""
    bucket: int = 512
    """Consecutive values that share a norm, the paper's d: 1 to 2^31 - 1."""
    coding: str = "fixed"
    """"fixed": fast, `bits` an element. "elias": the paper's, shorter where most levels are 0."""
    error_feedback: bool = False
    """Error feedback: keep a residual, and send 1 / (1 + variance bound) of the rounded value, so that it contracts. The papers
    have none."""

    optional: ClassVar[frozenset[str]] = frozenset({"coding", "error_feedback", "cost"})

    def __post_init__(self) -> None:
        if self.bits != "auto":
            self._check_integer("bits", 2, 8, " or 'auto'")
        self._check_cost()
        self._check_integer("bucket", 1, MAX_BUCKET)
        if self.coding not in _kernels.Coding.__members__:
            raise self._refuse("coding", " or ".join(repr(c) for c in _kernels.Coding.__members__))
        if not isinstance(self.error_feedback, bool):
            raise self._refuse("error_feedback", "true or false")

    @property
    def chooses(self) -> bool:
        """The bits."""
        return self.bits == "auto"

    @property
    def has_residual(self) -> bool:
        """Only under error feedback."""
        return self.error_feedback

    @property
    def is_sparse(self) -> bool:
        """Elias codes are short because most levels are 0."""
        return self.coding == "elias"

    @property
    def typical_ratio(self) -> float:
        """Of Elias codes: on Gaussian numbers; of bits that are chosen: as of 4."""
        if self.bits == "auto":
            return type(self)(bits=4, bucket=self.bucket, coding=self.coding, error_feedback=self.error_feedback).typical_ratio
        return _gaussian_ratio(self) if self.coding == "elias" else super().typical_ratio

    def kernel_options(self) -> dict[str, Any]:
        """What the kernels need to know of it."""
        coding = getattr(_kernels.Coding, self.coding)
        bits = 0 if self.bits == "auto" else self.bits
        return {**self.cost_options(), "bits": bits, "bucket": self.bucket, "coding": coding, "feedback": self.error_feedback}


@functools.cache
def _gaussian_ratio(codec: _Quantizer) -> float:
    grad = np.random.default_rng(0).standard_normal(2**16, np.float32)
    out = np.empty(codec.max_payload(grad.size), np.uint8)
    unbiased = dataclasses.replace(codec, error_feedback=False)
    return grad.nbytes / unbiased.encode(Vector.of(grad), None, None, 0, Vector.of(out)).bytes


@dataclasses.dataclass(frozen=True)
class QSGD(_Quantizer):
    """Levels k / s, k = 0..s, of the L2 norm, with s = 2^(bits-1) - 1 (section 3.1 of the paper)."""

    name: ClassVar[str] = "qsgd"


@dataclasses.dataclass(frozen=True)
class QSGDInf(_Quantizer):
    """QSGD with the maximum norm, as the paper's experiments have it: no value is off by more than norm / s."""

    name: ClassVar[str] = "qsgdinf"


@dataclasses.dataclass(frozen=True)
class NUQSGD(_Quantizer):
    """Levels 0 and 2^-s, ..., 1/2, 1 of the L2 norm, with s = 2^(bits-1) - 2 (section 3 of the paper): finer where most
    values are.
    """  # noqa: D205

    name: ClassVar[str] = "nuqsgd"
