"""What every codec has: options that are validated when it is made, a spec, and encode and decode over flat vectors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from hvd_compress import _kernels
from hvd_compress.vector import Vector

LARGE = 2**20
"""Elements of a segment whose header does not matter."""


class Encoded(NamedTuple):
    """What one encoding gave.

    Attributes:
        bytes: Length of the payload.
        selected: Number of elements sent, or None where the codec does not choose.
        residual_norm: L2 norm of the residual that was left, 0 without one.
        finite: False where the gradient, or its sum with the residual, held Inf or NaN: the payload then decodes to values
            that are not finite, and `residual_out` is to be thrown away.
        energy: Where the codec chooses how much to send, the squared L2 norm of what was to be sent; else 0.
        improvement: And the part of it by which that is expected to improve a step, 0 to 1.
    """

    bytes: int
    selected: int | None
    residual_norm: float
    finite: bool
    energy: float = 0.0
    improvement: float = 0.0


class Momentum(NamedTuple):
    """What a gradient is averaged with before it is encoded: ``grad_weight * gradient + weight * vector``.

    Attributes:
        vector: n float32.
        weight: Of the vector.
        grad_weight: Of the gradient.
    """

    vector: Vector
    weight: float
    grad_weight: float


class Measured(NamedTuple):
    """What sending costs, for codecs that choose how much to send, as a compression measures it.

    Attributes:
        latency: Seconds that an exchange takes, whatever its size.
        seconds_per_byte: More for each byte of a payload.
        explore: Over 0: this part of the elements is sent, and nothing is chosen, so that several sizes can be measured; of a
            scheme that keeps no residual its fourth root, since what such a scheme does not send is noise.
    """

    latency: float = 1e-3
    seconds_per_byte: float = 8e-9
    explore: float = 0.0

    @classmethod
    def of(cls, meter: _kernels.Meter) -> Measured:
        """What a meter has measured so far."""
        step = meter.step()
        return cls(step.latency, step.seconds_per_byte, step.explore)


ASSUMED = Measured()
"""Before something was measured: 1 ms and 1 Gbit/s."""


@dataclasses.dataclass(frozen=True)
class Codec:
    """One algorithm without communication: a flat vector to a payload of bytes, and payloads added to a flat vector.

    A codec is a value: immutable, hashable, equal to another with the same options, and ``parse(str(codec)) == codec``.
    """

    name: ClassVar[str]
    """The spec's name."""
    optional: ClassVar[frozenset[str]] = frozenset()
    """The options that `str` leaves out where they have their default."""
    allreduce_dtype: ClassVar[str | None] = None
    """Not None: Horovod's own allreduce in this dtype ("same": the gradient's) does what the codec does."""

    @classmethod
    def options(cls) -> list[dataclasses.Field[Any]]:
        """Its fields, in the order in which a spec has them: the codec's own, then those that several codecs have."""
        return sorted(dataclasses.fields(cls), key=lambda field: field.metadata.get("shared", False))

    def __str__(self) -> str:
        """The spec, with all options but the unset and the `optional` ones."""
        shown = [
            f"{field.name}={_show(value)}"
            for field in self.options()
            if (value := getattr(self, field.name)) is not None and not (field.name in self.optional and value == field.default)
        ]
        return self.name + (":" + ",".join(shown) if shown else "")

    @property
    def has_residual(self) -> bool:
        """Whether what encoding lost is kept and added to the next gradient."""
        return False

    def for_shape(self, shape: Sequence[int]) -> Codec:
        """The codec for a parameter of that shape: options that depend on the layer's kind are filled in."""
        return self

    def max_payload(self, n: int) -> int:
        """Upper bound of the payload of `n` elements, in bytes."""
        return self.kernel.max_payload(n)

    @property
    def typical_ratio(self) -> float:
        """Size of a float32 gradient over the size of its payload, as it is usually."""
        return 4 * LARGE / self.max_payload(LARGE)

    @property
    def is_sparse(self) -> bool:
        """Whether a payload has few of the elements, so that the sum of several takes more than one of them."""
        return False

    @property
    def is_joint(self) -> bool:
        """Whether how much is sent of a segment depends on all that travel with it: see `new_scope`."""
        return False

    @property
    def is_measured(self) -> bool:
        """Whether it asks what sending costs: see `Measured`."""
        return False

    @property
    def is_of_model(self) -> bool:
        """Whether it depends on all parameters of the model that have this codec: they travel in one bucket."""
        return False

    @property
    def shares_seed(self) -> bool:
        """Whether all ranks must encode with the same seed."""
        return self.kernel.shares_seed

    @property
    def grain(self) -> int:
        """A payload can be cut at multiples of so many elements."""
        return self.kernel.grain

    def encode(
        self,
        grad: Vector,
        residual_in: Vector | None,
        residual_out: Vector | None,
        seed: int,
        out: Vector,
        momentum: Momentum | None = None,
        measured: Measured = ASSUMED,
    ) -> Encoded:
        """Encodes one segment.

        Args:
            grad: n elements, float16, bfloat16, float32 or float64.
            residual_in: n float32, the residual so far; None where the codec has none.
            residual_out: n float32, receives the residual that is left; other memory than `residual_in`, so that the step
                can be undone. None exactly where `residual_in` is.
            seed: 64 bits. The same seed gives the same bytes.
            out: uint8, at least `max_payload(n)`.
            momentum: What the gradient is averaged with first.
            measured: What sending costs, for a codec that asks.

        Raises:
            ValueError: A vector has the wrong dtype or length, or the residual is missing or one too many.
        """
        n = grad.length
        dtype, (average, weight, average_weight) = _check_gradient(grad, momentum)
        self._check_room(n, out)
        addresses = self._check_residuals(n, residual_in, residual_out)
        step = _kernels.Step(seed, *measured)
        return _encoded(
            self.kernel.encode(grad.address, dtype, *addresses, n, step, out.address, average, weight, average_weight)
        )

    def new_scope(self) -> CodecScope:
        """What encodes several segments together, where the codec `is_joint`; ValueError where it is not."""
        if not self.is_joint:
            raise ValueError(f"{self} encodes each segment by itself")
        return CodecScope(self)

    def encode_again(
        self,
        payloads: Sequence[Vector],
        weight: float,
        residual_in: Vector | None,
        residual_out: Vector | None,
        seed: int,
        scratch: Vector,
        out: Vector,
        measured: Measured = ASSUMED,
    ) -> Encoded:
        """Encodes ``weight`` times the sum of what several payloads hold, as `encode` does.

        Args:
            payloads: uint8, each of n elements.
            weight: One over the number of ranks makes the mean.
            residual_in: As in `encode`.
            residual_out: As in `encode`.
            seed: As in `encode`.
            scratch: n float32, which are overwritten.
            out: As in `encode`.
            measured: As in `encode`.

        Raises:
            ValueError: As in `encode`.
            PayloadError: As in `decode_add`.
        """
        n = scratch.length
        self._check_room(n, out)
        addresses = self._check_residuals(n, residual_in, residual_out)
        step = _kernels.Step(seed, *measured)
        places = [(payload.address, payload.length) for payload in payloads]
        return _encoded(_kernels.encode_again(self.kernel, places, weight, *addresses, n, step, scratch.address, out.address))

    def _check_room(self, n: int, out: Vector) -> None:
        if out.dtype != "uint8" or out.length < self.max_payload(n):
            raise ValueError(f"room for {out.length} {out.dtype}: {n} elements can take {self.max_payload(n)} uint8")

    def _check_residuals(self, n: int, residual_in: Vector | None, residual_out: Vector | None) -> tuple[int, int]:
        """Raises ValueError where one of them does not fit; returns the addresses of the residuals, 0 without one."""
        for residual in (residual_in, residual_out):
            if (residual is not None) != self.has_residual:
                raise ValueError(f"{self} {'needs a' if self.has_residual else 'has no'} residual")
            if residual is not None and (residual.dtype, residual.length) != ("float32", n):
                raise ValueError(f"a residual of {residual.length} {residual.dtype} for {n} elements: it takes {n} float32")
        if residual_in is None or residual_out is None:
            return 0, 0
        if abs(residual_in.address - residual_out.address) < 4 * n:
            raise ValueError("residual_in and residual_out overlap: the old residual is kept to undo a step")
        return residual_in.address, residual_out.address

    def decode_add(self, payload: Vector, weight: float, out: Vector) -> None:
        """Adds ``weight * decoded`` to `out` (n float32).

        Raises:
            PayloadError: The payload (uint8) is not one that `encode` wrote for n elements. It is checked before it is used:
                nothing outside of the two vectors is touched, and `out` not either where the checksum does not match.
        """
        _check_decoding([payload], out)
        self.kernel.decode_add(payload.address, payload.length, weight, out.address, out.length)

    def decode(self, payloads: Sequence[Vector], weight: float, out: Vector) -> None:
        """Replaces `out` (n float32) by ``weight`` times the sum of what several payloads hold; zeros where there is none.

        Raises:
            PayloadError: As in `decode_add`; where it is not the first payload, those before it are in `out`.
        """
        _check_decoding(payloads, out)
        places = [(payload.address, payload.length) for payload in payloads]
        _kernels.decode_sum(self.kernel, places, weight, out.address, out.length)

    @cached_property
    def kernel(self) -> _kernels.Codec:
        """What encodes and decodes; immutable as well."""
        return _kernels.Codec(self.kernel_kind(), **self.kernel_options())

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle: the options; the kernel is made again."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def kernel_kind(self) -> _kernels.Kind:
        """What the kernels call it."""
        return getattr(_kernels.Kind, self.name)  # type: ignore[no-any-return]

    def kernel_options(self) -> dict[str, Any]:
        """What the kernels need to know of it."""
        return {}

    def _refuse(self, option: str, allowed: str) -> ValueError:
        return ValueError(f"{self.name}: {option}={getattr(self, option)!r} is not allowed; allowed is {allowed}")

    def _check_integer(self, option: str, low: int, high: int, other: str = "") -> None:
        value = getattr(self, option)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._refuse(option, f"a whole number from {low} to {high}{other}")


class CodecScope:
    """Segments that are encoded together: `add` each, `choose`, then `encode` each, in the order of their indices."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._kernel = codec.kernel.scope()
        self._memory: list[Any] = []  # is used until all is encoded
        self._lengths: dict[int, int] = {}

    def add(
        self,
        index: int,
        grad: Vector,
        residual_in: Vector | None,
        residual_out: Vector | None,
        momentum: Momentum | None = None,
    ) -> bool:
        """Takes a segment, with arguments as in `Codec.encode`, which must not change until it is encoded.

        Returns:
            Whether what is to be sent, which `residual_out` receives, is finite.

        Raises:
            ValueError: As in `Codec.encode`.
        """
        dtype, (average, weight, average_weight) = _check_gradient(grad, momentum)
        addresses = self._codec._check_residuals(grad.length, residual_in, residual_out)
        self._memory += [grad, residual_out, momentum]
        self._lengths[index] = grad.length
        return self._kernel.add(index, grad.address, dtype, *addresses, grad.length, average, weight, average_weight)

    def choose(self, measured: Measured = ASSUMED) -> None:
        """Chooses how much to send, when all are there."""
        self._kernel.choose(_kernels.Step(0, *measured))

    def encode(self, index: int, seed: int, out: Vector) -> Encoded:
        """Encodes a segment, after `choose`; `seed` and `out` as in `Codec.encode`."""
        self._codec._check_room(self._lengths[index], out)
        return _encoded(self._kernel.encode(index, seed, out.address))


def _check_gradient(grad: Vector, momentum: Momentum | None) -> tuple[_kernels.DType, tuple[int, float, float]]:
    """Raises ValueError where they do not fit; returns what the kernels take of them."""
    if grad.dtype not in _kernels.DType.__members__:
        raise ValueError(f"gradient of dtype {grad.dtype}: allowed are {', '.join(_kernels.DType.__members__)}")
    dtype = getattr(_kernels.DType, grad.dtype)
    if momentum is None:
        return dtype, (0, 1.0, 0.0)
    vector, weight, grad_weight = momentum
    n = grad.length
    if (vector.dtype, vector.length) != ("float32", n):
        raise ValueError(f"a momentum of {vector.length} {vector.dtype} for {n} elements: it takes {n} float32")
    return dtype, (vector.address, grad_weight, weight)


def _check_decoding(payloads: Sequence[Vector], out: Vector) -> None:
    for dtype in [payload.dtype for payload in payloads] or ["uint8"]:
        if dtype != "uint8" or out.dtype != "float32":
            raise ValueError(f"decodes uint8 into float32, not {dtype} into {out.dtype}")


def _encoded(encoded: _kernels.Encoded) -> Encoded:
    selected = None if encoded.selected < 0 else encoded.selected
    return Encoded(encoded.bytes, selected, encoded.residual_sq**0.5, encoded.finite, encoded.energy, encoded.improvement)


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
