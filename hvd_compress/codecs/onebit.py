"""One bit an element: EF-signSGD (Karimireddy et al., ICML 2019, arXiv 1901.09847) and APMSqueeze's compression."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from hvd_compress import _kernels
from hvd_compress.codecs.base import Codec


@dataclasses.dataclass(frozen=True)
class OneBit(Codec):
    """The sign of every element, with one scale for all of them; what that loses stays in the residual. sign(0) is +1.

    Payload: checksum (4 bytes), float32 scale, one bit an element from the low bit up, 1 where it is negative.

    Raises:
        ValueError: An option is out of range.
    """

    scale: str = "l1"
    """"l1": the mean magnitude, EF-signSGD's (algorithm 1 of its paper), which loses least. "l2": the root mean square, which
    keeps the norm, as in APMSqueeze (section 3 of the paper)."""

    name: ClassVar[str] = "onebit"

    def __post_init__(self) -> None:
        if self.scale not in _kernels.Scale.__members__:
            raise self._refuse("scale", " or ".join(repr(scale) for scale in _kernels.Scale.__members__))

    @property
    def has_residual(self) -> bool:
        """Signs alone do not converge."""
        return True

    def kernel_options(self) -> dict[str, Any]:
        """What the kernels need to know of it."""
        return {"scale": getattr(_kernels.Scale, self.scale)}
