"""`Compression`, as Horovod has it: one name per algorithm."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from horovod.torch.compression import Compressor, FP16Compressor, NoneCompressor

from hvd_compress.codecs import Codec, make, parse
from hvd_compress.torch.compressor import CodecCompressor

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]
F = TypeVar("F", bound=Callable[..., Any])


def _compression(codec: str | Codec, named_parameters: NamedParameters, options: dict[str, Any]) -> CodecCompressor:
    codec = parse(codec)
    known = [*(field.name for field in dataclasses.fields(codec)), *list(inspect.signature(CodecCompressor).parameters)[2:]]
    for option in options:
        if option not in known:
            raise ValueError(f"{codec.name}: unknown option {option!r}: there are {', '.join(known)}")
    return CodecCompressor(codec, named_parameters, **options)


class _None(NoneCompressor):  # type: ignore[misc]
    """No compression. As it is, Horovod's own; called with ``model.named_parameters()``, a compression with `stats`."""

    def __new__(cls, named_parameters: NamedParameters | None = None, **options: Any) -> Any:
        return super().__new__(cls) if named_parameters is None else _compression("none", named_parameters, options)


class _FP16(FP16Compressor):  # type: ignore[misc]
    """Half precision. As it is, Horovod's own; called with ``model.named_parameters()``, a compression with `stats`."""

    def __new__(cls, named_parameters: NamedParameters | None = None, **options: Any) -> Any:
        return super().__new__(cls) if named_parameters is None else _compression("fp16", named_parameters, options)


def _to_be_called(function: F) -> F:
    """Lets the function itself, passed as ``compression=`` without being called, say what is wrong."""

    def compress(_: torch.Tensor) -> Any:
        name = function.__name__
        raise TypeError(f"Compression.{name} was not called: pass Compression.{name}(model.named_parameters())")

    function.compress = compress  # type: ignore[attr-defined]
    return function


class Compression:
    """What to pass as ``compression=`` to `hvd.DistributedOptimizer`.

    Each takes ``model.named_parameters()``, the codec's options, and those of `CodecCompressor`, by keyword. Options are
    checked at once: ValueError names the option, the value and what is allowed.
    """

    none = _None
    fp16 = _FP16

    @staticmethod
    @_to_be_called
    def bf16(named_parameters: NamedParameters, **options: Any) -> CodecCompressor:
        """bfloat16 on the wire, summed in float32."""
        return _compression("bf16", named_parameters, options)

    @staticmethod
    @_to_be_called
    def adacomp(
        named_parameters: NamedParameters, *, bin: int | None = None, c: float = 2.0, **options: Any
    ) -> CodecCompressor:
        """AdaComp, see `hvd_compress.codecs.AdaComp`: about 40 times fewer bytes for convolutions, 200 for other layers."""
        return _compression(make("adacomp", bin=bin, c=c), named_parameters, options)

    @staticmethod
    @_to_be_called
    def qsgd(
        named_parameters: NamedParameters,
        *,
        bits: int = 4,
        bucket: int = 512,
        coding: str = "fixed",
        feedback: bool = False,
        **options: Any,
    ) -> CodecCompressor:
        """QSGD, see `hvd_compress.codecs.QSGD`: 32 / bits times fewer bytes, unbiased."""
        codec = make("qsgd", bits=bits, bucket=bucket, coding=coding, feedback=feedback)
        return _compression(codec, named_parameters, options)

    @staticmethod
    @_to_be_called
    def qsgdinf(
        named_parameters: NamedParameters,
        *,
        bits: int = 4,
        bucket: int = 512,
        coding: str = "fixed",
        feedback: bool = False,
        **options: Any,
    ) -> CodecCompressor:
        """QSGD with the maximum norm, see `hvd_compress.codecs.QSGDInf`."""
        codec = make("qsgdinf", bits=bits, bucket=bucket, coding=coding, feedback=feedback)
        return _compression(codec, named_parameters, options)

    @staticmethod
    @_to_be_called
    def nuqsgd(
        named_parameters: NamedParameters,
        *,
        bits: int = 4,
        bucket: int = 512,
        coding: str = "fixed",
        feedback: bool = False,
        **options: Any,
    ) -> CodecCompressor:
        """NUQSGD, see `hvd_compress.codecs.NUQSGD`: as QSGD, with levels that are finer near zero."""
        codec = make("nuqsgd", bits=bits, bucket=bucket, coding=coding, feedback=feedback)
        return _compression(codec, named_parameters, options)

    @staticmethod
    @_to_be_called
    def from_spec(
        spec: str | Codec, named_parameters: NamedParameters | None = None, **options: Any
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
        return _compression(codec, named_parameters, options)
