"""A compression's stats in TensorBoard."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_compress.tensorboard import TAG, histograms, scalars
from hvd_compress.torch.compressor import CodecCompressor


class TensorBoardStats:
    """Writes what was sent in a step, of this rank, as scalars, and how it is distributed over the parameters as histograms.

    One rank is enough::

        stats = TensorBoardStats(SummaryWriter(), compression) if hvd.rank() == 0 else None
        ...
            optimizer.step()
            if stats:
                stats.write()

    Args:
        writer: A `torch.utils.tensorboard.SummaryWriter`, or anything with its `add_scalar` and `add_histogram`.
        compression: Whose `stats`; made with parameters.
        tag: Begins the names.

    Raises:
        ValueError: The compression has no stats: Horovod's own.
    """

    def __init__(self, writer: Any, compression: CodecCompressor, tag: str = TAG) -> None:
        if not isinstance(compression, CodecCompressor):
            raise ValueError(
                f"compression={compression!r} has no stats; allowed is one that was made with model.named_parameters()"
            )
        self._writer = writer
        self._compression = compression
        self._tag = tag
        self._written = 0

    def write(self, step: int | None = None) -> None:
        """Writes the last step, once, after ``optimizer.step()``; `step`: default is how many the compression has finished."""
        stats = self._compression.stats
        if stats.steps == self._written:
            return
        self._written = stats.steps
        at = stats.steps if step is None else step
        for name, value in scalars(stats).items():
            self._writer.add_scalar(f"{self._tag}/{name}", value, at)
        for name, values in histograms(stats).items():
            self._writer.add_histogram(f"{self._tag}/{name}", np.asarray(values), at)
