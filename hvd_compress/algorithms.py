"""One name per algorithm, as Horovod's own `Compression` has: what the namespaces of both frameworks share."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from hvd_compress.codecs import Codec, make, parse
from hvd_compress.codecs.cost import Costed


class algorithm:  # used as a decorator, like classmethod
    """A class method that, passed as ``compression=`` without being called, says what is wrong."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, _: Any, owner: type[Algorithms]) -> Any:
        """The method of the namespace."""
        name = self._function.__name__

        def compress(_: Any) -> NoReturn:
            arguments = ", ".join(filter(None, ["spec" if name == "from_spec" else "", owner.call]))
            raise TypeError(f"Compression.{name} was not called: pass Compression.{name}({arguments})")

        @functools.wraps(self._function)
        def bound(*parameters: Any, **options: Any) -> Any:
            return self._function(owner, *parameters, **options)

        signature = inspect.signature(self._function)
        of_call = list(signature.parameters.values())[1:]
        bound.__signature__ = signature.replace(parameters=of_call)  # type: ignore[attr-defined]
        bound.compress = compress  # type: ignore[attr-defined]
        return bound


def _cost_of(options: dict[str, Any]) -> dict[str, Any]:
    """Takes the options of `hvd_compress.codecs.cost.Costed` out of them."""
    return {field.name: options.pop(field.name) for field in dataclasses.fields(Costed) if field.name in options}


class _Namespace(type):
    """Of `Algorithms`: what is not there is told what is."""

    def __getattr__(cls, name: str) -> Any:
        if name in ("compress", "decompress"):  # Horovod asks for it: the namespace itself was passed
            raise TypeError(f"Compression itself was passed as compression=: pass Compression.adacomp({cls.call}), for example")
        if name.startswith("_"):
            raise AttributeError(name)
        there = ", ".join(sorted(attribute for attribute in dir(cls) if isinstance(cls._raw(attribute), (algorithm, type))))
        raise AttributeError(f"Compression has no algorithm {name!r}: there are {there}")

    def _raw(cls, attribute: str) -> Any:
        found = inspect.getattr_static(cls, attribute)
        return None if attribute in ("compressor", "__class__") else found


class Algorithms(metaclass=_Namespace):
    """What to pass as ``compression=`` to Horovod.

    Each takes what the framework's compression needs (PyTorch: ``model.named_parameters()``; TensorFlow: nothing), the codec's
    options, and those of the framework's `CodecCompressor`, by keyword. Options are checked at once: ValueError names the
    option, the value and what is allowed.
    """

    call: ClassVar[str] = ""
    """What the framework's users write between the parentheses."""
    compressor: ClassVar[type]
    """The framework's `CodecCompressor`."""

    @classmethod
    def make(cls, codec: str | Codec, *parameters: Any, **options: Any) -> Any:
        """The compression of a codec."""
        codec = parse(codec)
        if cls.call and not parameters and "named_parameters" not in options:
            raise TypeError(f"{codec.name} needs parameters: pass Compression.{codec.name}({cls.call})")
        if parameters and not cls.call:
            raise TypeError("in TensorFlow a compression is made without the variables: it finds them; options go by keyword")
        of_compressor = inspect.signature(cls.compressor).parameters
        known = [field.name for field in codec.options()]
        known += [name for name, parameter in of_compressor.items() if parameter.kind is parameter.KEYWORD_ONLY]
        for option in options:
            if option not in known and option not in of_compressor:
                raise ValueError(f"{codec.name}: unknown option {option!r}: there are {', '.join(known)}")
        return cls.compressor(codec, *parameters, **options)

    @algorithm
    def bf16(cls, *parameters: Any, **options: Any) -> Any:
        """bfloat16 on the wire, summed in float32."""
        return cls.make("bf16", *parameters, **options)

    @algorithm
    def adacomp(cls, *parameters: Any, bin: int | None = None, c: float = 2.0, **options: Any) -> Any:
        """AdaComp, see `hvd_compress.codecs.AdaComp`: about 40 times fewer bytes for convolutions, 200 for other layers."""
        return cls.make(make("adacomp", bin=bin, c=c), *parameters, **options)

    @algorithm
    def qsgd(
        cls,
        *parameters: Any,
        bits: int | str = 4,
        bucket: int = 512,
        coding: str = "fixed",
        error_feedback: bool = False,
        **options: Any,
    ) -> Any:
        """QSGD, see `hvd_compress.codecs.QSGD`: 32 / bits times fewer bytes, unbiased."""
        codec = make("qsgd", bits=bits, bucket=bucket, coding=coding, error_feedback=error_feedback, **_cost_of(options))
        return cls.make(codec, *parameters, **options)

    @algorithm
    def qsgdinf(
        cls,
        *parameters: Any,
        bits: int | str = 4,
        bucket: int = 512,
        coding: str = "fixed",
        error_feedback: bool = False,
        **options: Any,
    ) -> Any:
        """QSGD with the maximum norm, see `hvd_compress.codecs.QSGDInf`."""
        codec = make("qsgdinf", bits=bits, bucket=bucket, coding=coding, error_feedback=error_feedback, **_cost_of(options))
        return cls.make(codec, *parameters, **options)

    @algorithm
    def nuqsgd(
        cls,
        *parameters: Any,
        bits: int | str = 4,
        bucket: int = 512,
        coding: str = "fixed",
        error_feedback: bool = False,
        **options: Any,
    ) -> Any:
        """NUQSGD, see `hvd_compress.codecs.NUQSGD`: as QSGD, with levels that are finer near zero."""
        codec = make("nuqsgd", bits=bits, bucket=bucket, coding=coding, error_feedback=error_feedback, **_cost_of(options))
        return cls.make(codec, *parameters, **options)

    @algorithm
    def onebit(cls, *parameters: Any, scale: str = "l1", **options: Any) -> Any:
        """EF-signSGD, see `hvd_compress.codecs.OneBit`: 32 times fewer bytes."""
        return cls.make(make("onebit", scale=scale), *parameters, **options)

    @algorithm
    def topk(
        cls,
        *parameters: Any,
        fraction: float | None = None,
        count: int | None = None,
        error_feedback: bool = True,
        **options: Any,
    ) -> Any:
        """The elements of largest magnitude, see `hvd_compress.codecs.TopK`."""
        codec = make("topk", fraction=fraction, count=count, error_feedback=error_feedback)
        return cls.make(codec, *parameters, **options)

    @algorithm
    def randomk(
        cls,
        *parameters: Any,
        fraction: float | None = None,
        count: int | None = None,
        error_feedback: bool = True,
        **options: Any,
    ) -> Any:
        """Random elements, the same on every rank, see `hvd_compress.codecs.RandomK`: no index is sent."""
        codec = make("randomk", fraction=fraction, count=count, error_feedback=error_feedback)
        return cls.make(codec, *parameters, **options)

    @algorithm
    def cat(
        cls,
        *parameters: Any,
        scheme: str = "topk",
        cost: str = "measured",
        c0: float | None = None,
        c1: float | None = None,
        pmax: int | None = None,
        latency: float | None = None,
        bandwidth: float | None = None,
        scope: str = "bucket",
        error_feedback: bool | None = None,
        **options: Any,
    ) -> Any:
        """CAT, see `hvd_compress.codecs.CAT`: how much is sent is chosen at every step, by improvement over cost. The options
        of the cost are those of `hvd_compress.codecs.cost.Costed`.
        """  # noqa: D205
        of_cost = {"cost": cost, "c0": c0, "c1": c1, "pmax": pmax, "latency": latency, "bandwidth": bandwidth}
        codec = make("cat", scheme=scheme, scope=scope, error_feedback=error_feedback, **of_cost)
        return cls.make(codec, *parameters, **options)
