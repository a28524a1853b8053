"""Named, asynchronous Horovod operations over bytes, and the stand-in for its allreduce."""

from __future__ import annotations

import time
from collections.abc import Sequence

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_compress import _kernels
from hvd_compress.exchange import Members


class Exchange(Members):
    """Allgathers and all-to-alls of bytes among the ranks of a process set.

    What is sent must stay as it is until the result is there. Its length may be another one on each rank.
    """

    def allgather_async(self, name: str, data: np.ndarray) -> Pending:
        """Enqueues `data` (uint8) for all ranks, and returns at once."""
        sent = torch.from_numpy(data)
        return Pending(hvd.allgather_async(sent, name=f"{self.prefix}.{name}", process_set=self.process_set))

    def alltoall_async(self, name: str, data: np.ndarray, lengths: Sequence[int]) -> Pending:
        """Enqueues `data` (uint8), so many bytes of it for each rank, and returns at once."""
        sent, splits = torch.from_numpy(data), torch.tensor(lengths, dtype=torch.int32)
        return Pending(hvd.alltoall_async(sent, splits, name=f"{self.prefix}.{name}", process_set=self.process_set))


class Pending:
    """An operation under way."""

    def __init__(self, handle: int) -> None:
        self._handle: int | None = handle
        self._data = np.empty(0, np.uint8)

    def poll(self, seconds: float = 0.0) -> bool:
        """Whether it is done, or becomes so within that time."""
        deadline = time.perf_counter() + seconds
        while self._handle is not None and not hvd.poll(self._handle):
            if time.perf_counter() >= deadline:
                return False
            time.sleep(0.0005)
        return True

    def wait(self) -> np.ndarray:
        """What all ranks sent to this one, in order of rank (uint8).

        Raises:
            RuntimeError: A rank has called hvd.join().
        """
        if self._handle is not None:
            handle, self._handle = self._handle, None
            try:
                result = hvd.synchronize(handle)
            except HorovodInternalError as error:
                if "not supported with Join" in str(error):
                    raise RuntimeError(
                        "hvd.join() is not supported together with hvd_compress: another rank has called it, and ranks that "
                        "have joined can take no part in an exchange. Give every rank the same number of steps."
                    ) from error
                raise
            received = result[0] if isinstance(result, tuple) else result  # an all-to-all tells the lengths too
            self._data = received.numpy()
        return self._data


class StandIn:
    """What Horovod's own allreduce gets instead of a gradient, to tell what the user's op makes of it: see csrc/stand_in.h."""

    @staticmethod
    def make(rank: int, size: int, digest: int) -> torch.Tensor:
        """A fresh one (float32): it is reduced in place."""
        return torch.tensor(_kernels.make_stand_in(rank, size, digest))

    @staticmethod
    def read(reduced: torch.Tensor, size: int, digest: int) -> tuple[float, bool]:
        """The factor that makes of a mean what the op gives, 1 for op=Average, n for op=Sum; and whether all plans agree.

        Raises:
            ValueError: It is another op.
        """
        values = reduced.tolist()
        factor = _kernels.stand_in_factor(values, size)
        return factor, _kernels.stand_in_agrees(values, factor, size, digest)
