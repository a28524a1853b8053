"""What a compression keeps of one variable: its residual, as tf.Variables."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable


class Slot(tf.Module):  # type: ignore[misc]
    """State of one variable.

    Attributes:
        residual: float32 [n], flat; [0] where there is none (yet).
        piece_residual: In a scatter-gather, of the mean of the piece that this rank encodes again; as `residual`.
        state: float64 [3]: how many times its gradient was encoded, the loss scale that both are in, and where the piece
            begins.
        label: Its name in stats.
        segment: Its number in the session.
    """

    def __init__(self, label: str, variable: Any, shape: tuple[int, ...], segment: int) -> None:
        super().__init__(name="slot")
        self.label = label
        self.shape = shape
        self.segment = segment
        # Lifted out of whatever is being traced, and in graph mode local: a broadcast of global variables must not give
        # every rank the residuals of rank 0.
        with tf.init_scope(), tf.device("CPU:0"):
            self.residual = _local_variable([], tf.float32, [None], f"hvd_compress/{label}/residual")
            self.piece_residual = _local_variable([], tf.float32, [None], f"hvd_compress/{label}/piece_residual")
            self.state = _local_variable([0.0, 1.0, 0.0], tf.float64, [3], f"hvd_compress/{label}/state")
            self._graph = _graph()
        self.follow(variable)

    def follow(self, variable: Any) -> None:
        """Belongs to that variable from now on."""
        self._variable = weakref.ref(variable)

    def is_of(self, variable: Any) -> bool:
        """Whether it belongs to that variable."""
        return self._variable() is variable

    def is_free_for(self, label: str, shape: tuple[int, ...]) -> bool:
        """Whether it belonged to a variable of that name and shape that is gone."""
        if self._variable() is not None or (self.label, self.shape) != (label, shape):
            return False
        with tf.init_scope():
            return self._graph is _graph()


def _local_variable(value: list[float], dtype: tf.DType, shape: list[int | None], name: str) -> tf.Variable:
    # The class itself: tf.Variable asks the variable creators of a tf.function that is being traced, and they refuse all but
    # its first trace.
    return ResourceVariable(
        initial_value=tf.constant(value, dtype, [len(value)]),
        trainable=False,
        collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
        dtype=dtype,
        shape=tf.TensorShape(shape),
        name=name,
    )


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
