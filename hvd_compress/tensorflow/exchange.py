"""How payloads travel: named Horovod operations; and how ranks compare their plans beforehand."""

from __future__ import annotations

import os
import threading
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.exchange import Members


class Exchange(Members):
    """Allgathers and all-to-alls of bytes among the ranks of a process set."""

    @property
    def is_alone(self) -> bool:
        """Whether there is, and will be, nobody to exchange with; an elastic job can grow."""
        return self.size <= 1 and not _is_elastic()

    def world(self) -> tf.Tensor:
        """The own rank and the number of ranks (int32 [2]), in the graph, where they may change."""
        if _is_elastic():
            set_id = self.process_set.process_set_id
            return tf.stack([hvd.rank_op(), hvd.size_op(process_set_id=set_id)])
        return tf.constant([self.rank, self.size], tf.int32)

    def allgather(self, name: str, message: tf.Tensor) -> tf.Tensor:
        """What all ranks sent, in order of rank (uint8); `message` may be short or long, differently on each rank."""
        return hvd.allgather(message, name=f"{self.prefix}.{name}", ignore_name_scope=True, process_set=self.process_set)

    def alltoall(self, name: str, messages: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
        """What all ranks sent to this one, in order of rank (uint8); `messages` has `lengths` bytes (int32) for each rank."""
        received, _ = hvd.alltoall(
            messages, lengths, name=f"{self.prefix}.{name}", ignore_name_scope=True, process_set=self.process_set
        )
        return received

    def sum(self, name: str, value: tf.Tensor) -> tf.Tensor:
        """The sum over the ranks of a number."""
        return hvd.allreduce(
            value, op=hvd.Sum, name=f"{self.prefix}.{name}", ignore_name_scope=True, process_set=self.process_set
        )

    def allgather_now(self, name: str, data: np.ndarray) -> Gathered:
        """Begins an allgather beside whatever is being traced."""
        return Gathered(lambda: self._run(name, data))

    def _run(self, name: str, data: np.ndarray) -> np.ndarray:
        # A graph and a session of its own: it works in eager and in graph mode, and while another graph is traced.
        with tf.Graph().as_default(), tf.device("CPU:0"):
            message = tf.compat.v1.placeholder(tf.uint8, [None])
            gathered = self.allgather(name, message)
            with tf.compat.v1.Session() as session:
                return np.asarray(session.run(gathered, {message: data}))


class Gathered:
    """An allgather under way in a thread of its own."""

    def __init__(self, run: Any) -> None:
        self._data: np.ndarray | None = None
        self._error: Exception | None = None
        self._done = threading.Event()
        self._run = run
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        try:
            self._data = self._run()
        except Exception as error:
            self._error = error
        self._done.set()

    def poll(self, seconds: float = 0.0) -> bool:
        """Whether it is done, or becomes so within that time."""
        return self._done.wait(seconds)

    def wait(self) -> np.ndarray:
        """What all ranks sent, in order of rank (uint8)."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._data is not None
        return self._data


def _is_elastic() -> bool:
    return bool(int(os.environ.get("HOROVOD_ELASTIC", 0)))
