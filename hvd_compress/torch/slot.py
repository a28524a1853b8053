"""One parameter of a compression: its segment, its memory layout and its residual."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvd_compress.codecs import Encoded
from hvd_compress.plan import Parameter, Segment
from hvd_compress.vector import Vector

REDUCED = (torch.float16, torch.float32, torch.float64)
"""The floating-point dtypes that Horovod's allreduce takes."""


def vector(tensor: torch.Tensor) -> Vector:
    """The memory of a contiguous CPU tensor."""
    return Vector(tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), tensor.numel(), tensor)


class Slot:
    """State of one parameter.

    A gradient is encoded in the order in which the *parameter* lies in memory, which backward keeps: channels-last weights are
    not copied, and a rank whose gradient lies otherwise copies.
    """

    segment: Segment

    def __init__(self, name: str, parameter: torch.nn.Parameter) -> None:
        self.name = name
        self.parameter = parameter
        # As dense memory: empty_like keeps the order of dense tensors and makes others row-major.
        self.strides = torch.empty_like(parameter, device="meta").stride()
        row_major = torch.empty(parameter.shape, device="meta").stride()
        self.described = Parameter(
            name,
            tuple(parameter.shape),
            str(parameter.dtype).removeprefix("torch."),
            "row-major" if self.strides == row_major else f"strides {self.strides}",
        )
        self.residual: torch.Tensor | None = None  # float32, flat
        self.spare: torch.Tensor | None = None  # the residual before, until the next encode
        self.stepped = False  # whether an optimizer has stepped since the last round's result was handed out
        self.ever_stepped = False
        self._result = (0, 0)  # id and address of the gradient that holds the last round's result

    # --- layout

    def flatten(self, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gradient as a flat CPU vector in the parameter's order; and once more where it is the gradient's own memory."""
        numel = grad.numel()
        if grad.device.type == "cpu" and self._lies_alike(grad):
            flat = grad.as_strided((numel,), (1,))
            return flat, flat
        copy = torch.empty_strided(grad.shape, self.strides, dtype=grad.dtype).copy_(grad)
        return copy.as_strided((numel,), (1,)), None

    def unflatten(self, flat: torch.Tensor) -> torch.Tensor:
        """A flat vector in the parameter's shape, without a copy."""
        return flat.as_strided(tuple(self.parameter.shape), self.strides)

    def _lies_alike(self, grad: torch.Tensor) -> bool:
        return all(s == 1 or mine == its for s, mine, its in zip(grad.shape, self.strides, grad.stride(), strict=True))

    # --- encode

    def encode(self, flat: torch.Tensor, seed: int, out: Vector) -> Encoded:
        """Encodes a flat gradient together with the residual; see `Codec.encode`."""
        codec = self.segment.codec
        if not codec.has_residual:
            return codec.encode(vector(self.with_leftover(flat)), None, None, seed, out)
        old = self.residual if self.residual is not None else torch.zeros(flat.numel())
        new = self.spare if self.spare is not None else torch.empty(flat.numel())
        self.residual, self.spare = new, old
        return codec.encode(vector(flat), vector(old), vector(new), seed, out)

    def with_leftover(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient plus the residual that a codec before left, which is then sent."""
        if self.residual is None:
            self.spare = None
            return grad
        left = self.residual if grad.dim() == 1 else self.unflatten(self.residual)
        self.residual, self.spare = None, self.residual
        return grad.to(torch.float32) + left.to(grad.device)

    def undo(self) -> None:
        """Takes the last `encode` back."""
        self.residual, self.spare = self.spare, self.residual

    def set_residual(self, residual: torch.Tensor | None) -> None:
        """Replaces the residual by one in the parameter's shape, or by none."""
        self.spare = None
        self.residual = None
        if residual is not None:
            self.residual = torch.empty(residual.numel())
            self.unflatten(self.residual).copy_(residual)

    # --- Horovod and autograd

    def remember_result(self, grad: torch.Tensor) -> None:
        """Notes that the round's result was written to that gradient; without keeping it alive."""
        self._result = (id(grad), grad.data_ptr())

    def is_result(self, grad: torch.Tensor) -> bool:
        """Whether that gradient is the one that the last round's result was written to."""
        return self._result == (id(grad), grad.data_ptr())

    def stand_in(self, grad: torch.Tensor) -> torch.Tensor:
        """What Horovod's allreduce gets instead of the gradient: a fresh one, since it is reduced in place."""
        return torch.ones(1, dtype=grad.dtype if grad.dtype in REDUCED else torch.float32, device=grad.device)

    @property
    def stand_in_bytes(self) -> int:
        """The size of what `stand_in` gives."""
        return self.parameter.element_size() if self.parameter.dtype in REDUCED else 4

    def watch(self, on_backward: Callable[[], Callable[[Slot], None] | None]) -> Any:
        """Has `on_backward()(self)` called whenever backward has accumulated into the gradient; a weak reference, as it is kept
        by the parameter.
        """  # noqa: D205

        def hook(_: torch.Tensor) -> None:
            call = on_backward()
            if call is not None:
                call(self)

        if not self.parameter.requires_grad:
            return _NoHook()
        return self.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


class _NoHook:
    def remove(self) -> None:
        """Nothing was hooked."""


def make_slots(named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> list[Slot]:
    """A slot for each named parameter. Raises ValueError where a name is there twice, or something is no such pair."""
    slots: list[Slot] = []
    seen: set[str] = set()
    for item in named_parameters:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], torch.Tensor)):
            raise ValueError(
                f"named_parameters has {item!r}: it takes (name, parameter) pairs, as model.named_parameters() gives"
            )
        if item[0] in seen:
            raise ValueError(f"named_parameters has the name {item[0]!r} twice")
        seen.add(item[0])
        slots.append(Slot(*item))
    return slots
