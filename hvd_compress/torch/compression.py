"""`Compression`, as Horovod has it: one name per algorithm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from horovod.torch.compression import Compressor, FP16Compressor, NoneCompressor

from hvd_compress.algorithms import Algorithms, algorithm
from hvd_compress.codecs import Codec, parse
from hvd_compress.torch.compressor import CodecCompressor

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


class _None(NoneCompressor):  # type: ignore[misc]
    """No compression. As it is, Horovod's own; called with ``model.named_parameters()``, a compression with `stats`."""

    def __new__(cls, named_parameters: NamedParameters | None = None, **options: Any) -> Any:
        return super().__new__(cls) if named_parameters is None else Compression.make("none", named_parameters, **options)


class _FP16(FP16Compressor):  # type: ignore[misc]
    """Half precision. As it is, Horovod's own; called with ``model.named_parameters()``, a compression with `stats`."""

    def __new__(cls, named_parameters: NamedParameters | None = None, **options: Any) -> Any:
        return super().__new__(cls) if named_parameters is None else Compression.make("fp16", named_parameters, **options)


class Compression(Algorithms):
    """What to pass as ``compression=`` to `hvd.DistributedOptimizer`.

    Each takes ``model.named_parameters()``, the codec's options, and those of `CodecCompressor`, by keyword. Options are
    checked at once: ValueError names the option, the value and what is allowed.
    """

    call = "model.named_parameters()"
    compressor = CodecCompressor

    none = _None
    fp16 = _FP16

    @algorithm
    def from_spec(
        cls, spec: str | Codec, named_parameters: NamedParameters | None = None, **options: Any
    ) -> CodecCompressor | Compressor:
        """The compression of a spec such as ``"nuqsgd:bits=4,bucket=512"``, for command-line flags.

        Raises:
            ValueError: The spec or an option is not allowed.
            TypeError: The codec needs `named_parameters`; none and fp16 do without, and then have no `stats`.
        """
        codec = parse(spec)
        if named_parameters is None:
            if codec.allreduce_dtype is None:
                raise TypeError(f"{codec} needs parameters: Compression.from_spec(spec, model.named_parameters())")
            if options:
                raise ValueError(f"{codec} without parameters is Horovod's own and has no option {next(iter(options))!r}")
            return _None() if codec.name == "none" else _FP16()
        return cls.make(codec, named_parameters, **options)
