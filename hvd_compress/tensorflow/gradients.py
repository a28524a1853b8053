"""Which variable a gradient belongs to.

Horovod calls `compress` with a bare tensor while the graph is traced. The gradients that it reduces together, and their
variables, are local variables of its function `allreduce_grads`, a few calls up the stack: they are read from there. A tensor
that does not come from `allreduce_grads` has no variable.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

import tensorflow as tf


class Gradients(NamedTuple):
    """What Horovod reduces together.

    Attributes:
        grads: Its list: tensors, tf.IndexedSlices and None.
        variables: As many; of what each is the gradient.
        op: The user's.
        process_set: The user's.
        callers: Objects whose methods asked for the gradients, the innermost first.
    """

    grads: Sequence[Any]
    variables: Sequence[Any]
    op: Any
    process_set: Any
    callers: Sequence[Any]

    @property
    def loss_scale_optimizer(self) -> Any:
        """Keras' LossScaleOptimizer that asked for the gradients; None where none did."""
        return next((caller for caller in self.callers if is_loss_scale_optimizer(caller)), None)

    @property
    def is_export(self) -> bool:
        """Whether it is traced to be exported, with stand-ins for variables, as `model.save` does, often on one rank alone."""
        with tf.init_scope():
            eager = tf.executing_eagerly()
        handles = [getattr(variable, "handle", None) for variable in self.variables]
        return eager and any(handle is not None and tf.is_symbolic_tensor(handle) for handle in handles)

    @property
    def names(self) -> list[str]:
        """Of the variables, as a policy sees them; unique."""
        names: dict[str, None] = {}  # in order
        for place, variable in enumerate(self.variables):
            name = base = variable.name.split(":")[0] if isinstance(variable, tf.Variable) else f"gradient_{place}"
            count = 1
            while name in names:
                count += 1
                name = f"{base}_{count}"
            names[name] = None
        return list(names)

    @property
    def dense(self) -> list[int]:
        """Places of those that Horovod compresses: tensors."""
        return [i for i, grad in enumerate(self.grads) if isinstance(grad, tf.Tensor)]


def reduced_together(tensor: tf.Tensor) -> Gradients | None:
    """What is reduced together with that tensor; None where it does not come from Horovod's optimizers or tapes."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals
        grads, variables = found.get("grads"), found.get("vars")
        if (
            frame.f_globals.get("__name__", "").startswith("horovod.")
            and isinstance(grads, (list, tuple))
            and isinstance(variables, (list, tuple))
            and any(grad is tensor for grad in grads)
        ):
            return Gradients(grads, variables, found.get("op"), found.get("process_set"), _callers(frame))
        frame = frame.f_back
    return None


def _callers(frame: FrameType | None) -> list[Any]:
    callers = []
    while frame is not None:
        if "self" in frame.f_locals:
            callers.append(frame.f_locals["self"])
        frame = frame.f_back
    return callers


def is_loss_scale_optimizer(candidate: Any) -> bool:
    """Whether that is a LossScaleOptimizer of any Keras."""
    kinds = () if isinstance(candidate, type) else type(candidate).__mro__
    return any(kind.__name__.startswith("LossScaleOptimizer") for kind in kinds)


def loss_scale(optimizer: Any) -> tf.Tensor:
    """Its scale now (float32, no dimensions); 1 without an optimizer."""
    if optimizer is None:
        return tf.constant(1.0)
    if hasattr(optimizer, "loss_scale"):
        scale = optimizer.loss_scale
    else:  # Keras 3
        scale = optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale
    return tf.cast(tf.convert_to_tensor(scale), tf.float32)
