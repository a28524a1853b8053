"""AdaComp: adaptive residual gradient compression (Chen et al., AAAI 2018, arXiv 1712.02679)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from hvd_compress.codecs.base import Codec

MAX_BIN = 16383


@dataclasses.dataclass(frozen=True)
class AdaComp(Codec):
    """Algorithm 2 of the paper: in each bin, what is at least as large as the bin's maximum once this step's gradient is added
    (c - 1) times more, is sent as a sign times one scale per layer; the rest stays in the residual.

    Payload: checksum (4 bytes), float32 scale, and one word per selected element: index in the bin, "last of its bin", sign;
    8-bit words for bins under 64, 16-bit words else; one word for an empty bin.

    Raises:
        ValueError: An option is out of range.
    """  # noqa: D205

    bin: int | None = None
    """Elements a bin, the paper's L_T: 1 to 16383. None: 50 for convolutions, 500 for everything else."""
    c: float = 2.0
    """Soft threshold's scale factor; 1 selects the bin maxima only (the paper's "LS")."""

    name: ClassVar[str] = "adacomp"

    def __post_init__(self) -> None:
        if self.bin is not None:
            self._check_integer("bin", 1, MAX_BIN)
        if isinstance(self.c, bool) or not isinstance(self.c, (int, float)) or not 1 <= self.c <= 1e6:
            raise self._refuse("c", "a number from 1 to 1e6")
        object.__setattr__(self, "c", float(self.c))

    @property
    def has_residual(self) -> bool:
        """AdaComp lives from its residual."""
        return True

    @property
    def is_sparse(self) -> bool:
        """Some 5 elements of a bin."""
        return True

    @property
    def typical_ratio(self) -> float:
        """As of section 3 of the paper, and steady Gaussian gradients: about 5 words for each bin."""
        bin = self.bin or 500
        return 32 * bin / (min(5, bin) * (8 if bin < 64 else 16))

    def for_shape(self, shape: Sequence[int]) -> AdaComp:
        """Section 4 of the paper: L_T = 50 for convolutions (more than two dimensions), 500 for the other kinds of layer."""
        return self if self.bin is not None else dataclasses.replace(self, bin=50 if len(shape) > 2 else 500)

    def kernel_options(self) -> dict[str, Any]:
        """What the kernels need to know of it."""
        if self.bin is None:
            raise ValueError("adacomp without bin: for_shape() chooses it from the layer's shape")
        assert math.isfinite(self.c)
        return {"bin": self.bin, "c": self.c}
