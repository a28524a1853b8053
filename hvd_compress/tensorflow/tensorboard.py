"""A compression's stats in TensorBoard: a Keras callback, which a loop of one's own can call too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from hvd_compress.tensorboard import TAG, histograms, scalars
from hvd_compress.tensorflow.compressor import CodecCompressor


class TensorBoardStats(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Writes what was sent in a step, of this rank, as scalars, and how it is distributed over the variables as histograms.

    One rank is enough::

        if hvd.rank() == 0:
            callbacks.append(TensorBoardStats("logs", compression, update_freq=10))

    A loop of your own calls `write` after a step.

    Args:
        log_dir: Where to write, beside what `tf.keras.callbacks.TensorBoard` does.
        compression: Whose `stats`.
        update_freq: "batch", "epoch" or a number of batches, as `tf.keras.callbacks.TensorBoard` takes it.
        tag: Begins the names.

    Raises:
        ValueError: `update_freq` is not allowed, or the compression has no stats: Horovod's own.
    """

    def __init__(
        self, log_dir: str | Path, compression: CodecCompressor, update_freq: int | str = "epoch", tag: str = TAG
    ) -> None:
        super().__init__()
        self._supports_tf_logs = True  # none are looked at
        if not isinstance(compression, CodecCompressor):
            raise ValueError(f"compression={compression!r} has no stats; allowed is one of hvd_compress.tensorflow.Compression")
        every = {"batch": 1, "epoch": 0}.get(update_freq, update_freq) if isinstance(update_freq, str) else update_freq
        if isinstance(every, bool) or not isinstance(every, int) or (every < 1 and update_freq != "epoch"):
            raise ValueError(f"update_freq={update_freq!r} is not allowed; allowed is 'batch', 'epoch' or a number from 1 on")
        self._every = every
        self._folder = str(Path(log_dir) / TAG)
        self._writer: Any = None
        self._compression = compression
        self._tag = tag
        self._epochs_batches = 0  # of the epochs before
        self._batches = 0  # of all
        self._written = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """See `tf.keras.callbacks.Callback`."""
        before, self._batches = self._batches, self._epochs_batches + batch + 1  # several, with steps_per_execution
        if self._every and self._batches // self._every > before // self._every:
            self.write()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See `tf.keras.callbacks.Callback`."""
        self._epochs_batches = self._batches
        self.write()

    def on_train_end(self, logs: Any = None) -> None:
        """See `tf.keras.callbacks.Callback`."""
        self.write()
        if self._writer is not None:
            self._writer.flush()

    def write(self, step: int | None = None) -> None:
        """Writes the last step's, once; `step`: default is how many the compression has finished."""
        stats = self._compression.stats
        if stats.steps == self._written:
            return
        self._written = stats.steps
        at = stats.steps if step is None else step
        if self._writer is None:
            self._writer = tf.summary.create_file_writer(self._folder)
        with self._writer.as_default(step=at), tf.summary.record_if(True):
            for name, value in scalars(stats).items():
                tf.summary.scalar(f"{self._tag}/{name}", value)
            for name, values in histograms(stats).items():
                tf.summary.histogram(f"{self._tag}/{name}", values)
