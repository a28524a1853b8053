"""The codecs that only convert: the baselines."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hvd_compress.codecs.base import Codec


@dataclasses.dataclass(frozen=True)
class Identity(Codec):
    """Nothing is compressed: Horovod's dense allreduce."""

    name: ClassVar[str] = "none"
    allreduce_dtype: ClassVar[str | None] = "same"


@dataclasses.dataclass(frozen=True)
class FP16(Codec):
    """Half precision, summed in half precision by Horovod's allreduce, as `horovod.torch.Compression.fp16` does."""

    name: ClassVar[str] = "fp16"
    allreduce_dtype: ClassVar[str | None] = "float16"


@dataclasses.dataclass(frozen=True)
class BF16(Codec):
    """bfloat16. Horovod reduces no bfloat16, so the payloads are exchanged, and summed in float32.

    Payload: checksum (4 bytes), 2 bytes an element.
    """

    name: ClassVar[str] = "bf16"
