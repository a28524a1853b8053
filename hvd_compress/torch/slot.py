"""One parameter of a compression: its segment, its memory layout, its residual, and whether its last result was used."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from hvd_compress.codecs import Encoded
from hvd_compress.codecs.base import CodecScope, Measured, Momentum
from hvd_compress.plan import Parameter, Segment
from hvd_compress.torch.memory import vector
from hvd_compress.torch.residual import Residual
from hvd_compress.vector import Vector


class Slot:
    """State of one parameter.

    A gradient is encoded in the order in which the *parameter* lies in memory, which backward keeps: channels-last weights are
    not copied, and a rank whose gradient lies otherwise copies.

    Attributes:
        segment: What the plan says of it.
        residual: What encoding its gradients has lost, in the parameter's order.
        piece: Of which of its elements this rank is the owner, in a scatter-gather.
        piece_residual: What encoding the mean of that piece has lost.
        scale: The loss scale that both are in.
        stepped: Whether an optimizer has stepped on the parameter since the last result was handed out.
        ever_stepped: Whether one ever has.
    """

    segment: Segment

    def __init__(self, name: str, parameter: torch.nn.Parameter) -> None:
        self.name = name
        self.parameter = parameter
        # As dense memory: empty_like keeps the order of dense tensors and makes others row-major.
        self._strides = torch.empty_like(parameter, device="meta").stride()
        row_major = torch.empty(parameter.shape, device="meta").stride()
        self.described = Parameter(
            name,
            tuple(parameter.shape),
            str(parameter.dtype).removeprefix("torch."),
            "row-major" if self._strides == row_major else f"strides {self._strides}",
        )
        self.residual = Residual()
        self.piece = (0, 0)
        self.piece_residual = Residual()
        self.scale = 1.0
        self.stepped = False
        self.ever_stepped = False
        self._undecided = False  # whether the last residual may still have to be undone
        self._result: weakref.ref[torch.Tensor] | None = None  # the gradient that the last result was written to
        self._version = 0  # of the parameter then

    # --- layout

    def flatten(self, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gradient as a flat CPU vector in the parameter's order; and once more where it is the gradient's own memory."""
        numel = grad.numel()
        if grad.device.type == "cpu" and self._lies_alike(grad):
            flat = grad.as_strided((numel,), (1,))
            return flat, flat
        copy = torch.empty_strided(grad.shape, self._strides, dtype=grad.dtype).copy_(grad)
        return copy.as_strided((numel,), (1,)), None

    def unflatten(self, flat: torch.Tensor) -> torch.Tensor:
        """A flat vector in the parameter's shape, without a copy."""
        return flat.as_strided(tuple(self.parameter.shape), self._strides)

    def _lies_alike(self, grad: torch.Tensor) -> bool:
        strides = grad.stride()
        if strides == self._strides:
            return True
        return all(s == 1 or mine == its for s, mine, its in zip(grad.shape, self._strides, strides, strict=True))

    # --- encode

    def encode(self, flat: torch.Tensor, seed: int, out: Vector, momentum: Momentum | None, measured: Measured) -> Encoded:
        """Encodes a flat gradient together with the residual; see `Codec.encode`."""
        codec = self.segment.codec
        if not codec.has_residual:
            return codec.encode(vector(self.with_leftover(flat)), None, None, seed, out, momentum, measured)
        encoded = self.residual.replace(
            flat.numel(), lambda old, new: codec.encode(vector(flat), old, new, seed, out, momentum, measured)
        )
        self.residual.sq = encoded.residual_norm**2
        return encoded

    def survey(self, scope: CodecScope, flat: torch.Tensor, momentum: Momentum | None) -> None:
        """Adds a flat gradient and the residual to a scope; see `CodecScope.add`."""
        index = self.segment.index
        if self.segment.codec.has_residual:
            self.residual.replace(flat.numel(), lambda old, new: scope.add(index, vector(flat), old, new, momentum))
        else:
            scope.add(index, vector(self.with_leftover(flat)), None, None, momentum)

    def surveyed(self, encoded: Encoded) -> None:
        """What was added to a scope was encoded."""
        if self.segment.codec.has_residual:
            self.residual.sq = encoded.residual_norm**2

    def encode_again(
        self, payloads: Sequence[Vector], weight: float, seed: int, scratch: Vector, out: Vector, measured: Measured
    ) -> Encoded:
        """Encodes the mean of the own piece together with its residual; see `Codec.encode_again`."""
        codec = self.segment.codec
        if not codec.has_residual:
            return codec.encode_again(payloads, weight, None, None, seed, scratch, out, measured)
        encoded = self.piece_residual.replace(
            scratch.length, lambda old, new: codec.encode_again(payloads, weight, old, new, seed, scratch, out, measured)
        )
        self.piece_residual.sq = encoded.residual_norm**2
        return encoded

    def with_leftover(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient plus the residual that a codec before left, which is then sent."""
        residual = self.residual.take()
        if residual is None:
            return grad
        left = residual if grad.dim() == 1 else self.unflatten(residual)
        return grad.to(torch.float32) + left.to(grad.device)

    def keep(self) -> None:
        """Stands for an `encode` that sends nothing and leaves the residual as it is."""
        self.residual.keep()

    def undo(self, round: object = None) -> None:
        """Takes the last encodings back; where `round` is given, those of that round."""
        for residual in (self.residual, self.piece_residual):
            if round is None or residual.round is round:
                residual.undo()
        self._undecided = False

    def fold(self, ranks: int) -> None:
        """Adds the residual of the own piece to that of the gradient, which is divided by the number of ranks."""
        if self.piece_residual.exists:
            self.residual.add(self.piece_residual, ranks, self.parameter.numel(), self.piece)
        self.piece_residual.set(None)

    def follow_scale(self, scale: float) -> None:
        """Residuals are in units of the loss scale: where that has changed, they change alike (by a power of 2: exactly)."""
        if scale != self.scale:
            self.residual.scale(scale / self.scale)
            self.piece_residual.scale(scale / self.scale)
        self.scale = scale

    def set_residuals(self, residual: torch.Tensor | None, piece_residual: torch.Tensor | None, scale: float) -> None:
        """Replaces them by one in the parameter's shape, and by a flat one, or by none."""
        flat = None
        if residual is not None:
            flat = torch.empty(residual.numel())
            self.unflatten(flat).copy_(residual)
        self.residual.set(flat)
        self.piece_residual.set(None if piece_residual is None else piece_residual.clone())
        self.scale = scale
        self._undecided = False

    # --- whether the last result was used

    def hand_out(self, grad: torch.Tensor) -> None:
        """Notes that a round's result was written to that gradient; without keeping it alive."""
        self._result = weakref.ref(grad)
        self._version = self.parameter._version
        self.stepped = False
        self._undecided = True

    def is_result(self, grad: torch.Tensor) -> bool:
        """Whether that gradient is the one that the last result was written to."""
        return self._result is not None and self._result() is grad

    def decide(self, grad: torch.Tensor) -> None:
        """Before a new gradient is encoded: undoes the last `encode` where its result was thrown away.

        That is so where no optimizer has stepped since, nothing has changed the parameter, and the gradient that held the
        result is gone: the user has skipped the step, or it was another optimizer's backward (a GAN's generator's) that
        passed through this parameter. Parameters that no optimizer of torch's ever steps on are taken as used.
        """
        if self._undecided and self._unused() and not self.is_result(grad):
            self.undo()
        self._undecided = False

    def settled(self, residual: Residual) -> torch.Tensor | None:
        """What belongs to the parameter as it is now: before a step that is not made yet, the one before."""
        return residual.before if self._undecided and self._unused() else residual.value

    def _unused(self) -> bool:
        return self.ever_stepped and not self.stepped and self.parameter._version == self._version

    def watch(self, on_backward: Callable[[], Callable[[Slot], None] | None]) -> Callable[[], None]:
        """Has `on_backward()(self)` called whenever backward has accumulated into the gradient, and returns what ends that.

        `on_backward` is a weak reference: the parameter keeps it.
        """

        def hook(_: torch.Tensor) -> None:
            call = on_backward()
            if call is not None:
                call(self)

        if not self.parameter.requires_grad:
            return lambda: None
        handle = self.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return handle.remove  # type: ignore[no-any-return]


def make_slots(named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> list[Slot]:
    """A slot for each named parameter.

    Raises:
        ValueError: There are none, a name is there twice, or something is no pair of name and parameter.
    """
    if not isinstance(named_parameters, Iterable):
        raise ValueError(f"named_parameters is a {type(named_parameters).__name__}: it takes model.named_parameters()")
    slots: list[Slot] = []
    seen: set[str] = set()
    for item in named_parameters:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], torch.Tensor)):
            what = type(item).__name__
            raise ValueError(
                f"named_parameters has a {what}: it takes (name, parameter) pairs, as model.named_parameters() gives"
            )
        if item[0] in seen:
            raise ValueError(f"named_parameters has the name {item[0]!r} twice")
        seen.add(item[0])
        slots.append(Slot(*item))
    if not slots:
        raise ValueError("named_parameters is empty: has its iterator been used up before?")
    return slots
