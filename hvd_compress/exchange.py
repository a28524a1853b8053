"""What the exchanges of both frameworks know: among whom, and under which names."""

from __future__ import annotations

from typing import Any


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
    def size(self) -> int:
        """Number of ranks in the process set; 0 where this process is none of them."""
        return int(self.process_set.size()) if self.process_set.included() else 0

    @property
    def rank(self) -> int:
        """The own rank in the process set; -1 where this process has none."""
        return int(self.process_set.rank()) if self.process_set.included() else -1
