"""`Compression`, as Horovod has it: one name per algorithm."""

from __future__ import annotations

from typing import Any

from horovod.tensorflow.compression import FP16Compressor, NoneCompressor

from hvd_compress.algorithms import Algorithms, algorithm
from hvd_compress.codecs import Codec
from hvd_compress.tensorflow.compressor import CodecCompressor


class _None(NoneCompressor):  # type: ignore[misc]
    """No compression. As it is, Horovod's own; called, a compression with `stats`."""

    def __new__(cls, **options: Any) -> Any:
        return Compression.make("none", **options)


class _FP16(FP16Compressor):  # type: ignore[misc]
    """Half precision. As it is, Horovod's own; called, a compression with `stats`."""

    def __new__(cls, **options: Any) -> Any:
        return Compression.make("fp16", **options)


class Compression(Algorithms):
    """What to pass as ``compression=`` to Horovod's optimizers and to `hvd.DistributedGradientTape`.

    Each takes the codec's options, and those of `CodecCompressor`, by keyword. Options are checked at once: ValueError names
    the option, the value and what is allowed.
    """

    compressor = CodecCompressor

    none = _None
    fp16 = _FP16

    @algorithm
    def from_spec(cls, spec: str | Codec, **options: Any) -> Any:
        """The compression of a spec such as ``"nuqsgd:bits=4,bucket=512"``, for command-line flags.

        Raises:
            ValueError: The spec or an option is not allowed.
        """
        return cls.make(spec, **options)
