"""How payloads travel: one named, asynchronous Horovod allgather for each message."""

from __future__ import annotations

import time

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_compress import _kernels
from hvd_compress.exchange import Members
from hvd_compress.message import Message, read_messages
from hvd_compress.vector import Vector


class Exchange(Members):
    """Allgathers of bytes among the ranks of a process set."""

    def allgather_async(self, name: str, data: np.ndarray) -> Gathered:
        """Enqueues `data` (uint8; may be short or long, differently on each rank) and returns at once.

        `data` must stay as it is until the result is there.
        """
        return Gathered(hvd.allgather_async(torch.from_numpy(data), name=f"{self.prefix}.{name}", process_set=self.process_set))


class Gathered:
    """An allgather under way."""

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
        """What all ranks sent, in order of rank (uint8).

        Raises:
            RuntimeError: A rank has called hvd.join().
        """
        if self._handle is not None:
            handle, self._handle = self._handle, None
            try:
                self._data = hvd.synchronize(handle).numpy()
            except HorovodInternalError as error:
                if "not supported with Join" in str(error):
                    raise RuntimeError(
                        "hvd.join() is not supported together with hvd_compress: another rank has called it, and ranks that "
                        "have joined can take no part in an allgather. Give every rank the same number of steps."
                    ) from error
                raise
        return self._data


class InFlight:
    """One message under way: sent when it is made, parsed when it is waited for.

    Attributes:
        bytes: What all ranks sent, once it is there.
        messages: The message of each rank in it; empty until it is there.
    """

    bytes: Vector

    def __init__(self, exchange: Exchange, name: str, data: np.ndarray, ranks: int) -> None:
        self._gathered = exchange.allgather_async(name, data)
        self._ranks = ranks
        self.messages: list[Message] = []

    def poll(self, seconds: float = 0.0) -> bool:
        """Whether it is there, or comes within that time."""
        return self._gathered.poll(seconds)

    def drain(self) -> None:
        """Waits without asking for the result; where it has failed already, that was said then."""
        self._gathered.wait()

    def wait(self) -> None:
        """Waits until it is there, and parses it."""
        data = self._gathered.wait()
        self.bytes = Vector.of(data)
        self.messages = read_messages(data, self._ranks)


class StandIn:
    """What Horovod's own allreduce gets instead of a gradient, to tell what the user's op makes of it: see csrc/stand_in.h."""

    @staticmethod
    def make(rank: int, size: int) -> torch.Tensor:
        """A fresh one (float32): it is reduced in place."""
        return torch.tensor((1.0, rank / size))

    @staticmethod
    def read(reduced: torch.Tensor, size: int) -> float:
        """The factor that makes of a mean what the op gives: 1 for op=Average, n for op=Sum.

        Raises:
            ValueError: It is another op.
        """
        one, rank = reduced.tolist()
        return _kernels.stand_in_factor(one, rank, size)
