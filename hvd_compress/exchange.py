"""What the exchanges of both frameworks know: among whom, under which names, and which one is shorter."""

from __future__ import annotations

from typing import Any

from hvd_compress.codecs import Codec

ALLGATHER = "allgather"
"""Every rank gets the payloads of all: (n-1) payloads from each of n ranks."""
SCATTER_GATHER = "scatter-gather"
"""Every rank gets its chunk of the payloads of all, and sends the mean of it, encoded again, to all: 2 (n-1)/n payloads."""
ALLREDUCE = "allreduce"
"""Horovod's own, of the gradient."""
AUTO = "auto"


def shorter(codec: Codec, ranks: int) -> str:
    """The exchange in which each of so many ranks sends less.

    With two ranks both send one payload, and allgather encodes but once. The mean of sparse payloads is as large as all of them
    together, until it is dense: only then scatter-gather, which sends the mean, is the shorter one.
    """
    if ranks <= 2 or (codec.is_sparse and ranks <= 1 + codec.typical_ratio):
        return ALLGATHER
    return SCATTER_GATHER


class Members:
    """The ranks of a process set.

    Args:
        prefix: Begins the name of every operation; unique among the compressions of a job, the same on every rank.
        process_set: Horovod's.
    """

    def __init__(self, prefix: str, process_set: Any) -> None:
        self.prefix = prefix
        self.process_set = process_set

    @property
    def network(self) -> str:
        """Names what its messages travel on, for a `Meter`."""
        return f"process set {self.process_set.process_set_id or 0}"

    @property
    def size(self) -> int:
        """Number of ranks in the process set; 0 where this process is none of them."""
        return int(self.process_set.size()) if self.process_set.included() else 0

    @property
    def rank(self) -> int:
        """The own rank in the process set; -1 where this process has none."""
        return int(self.process_set.rank()) if self.process_set.included() else -1
