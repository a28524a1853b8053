"""Segments that travel in one message, and when it is sent."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hvd_compress import _kernels
from hvd_compress.codecs.base import Measured
from hvd_compress.exchange import SCATTER_GATHER
from hvd_compress.message import Flags, MessageWriter
from hvd_compress.torch.exchange import Exchange
from hvd_compress.torch.memory import Scratch
from hvd_compress.torch.round import Round
from hvd_compress.torch.slot import Slot
from hvd_compress.torch.transfer import Check, ChunkBuffers, Chunked, Gather, ScatterGather, Transfer


class Bucket:
    """It is sent when every segment has come that came in the round before: a parameter that is frozen, or belongs to another
    optimizer, never comes. One that comes unexpectedly is late: late ones go into a second message, when all gradients are
    there. Both are the same on all ranks, since Horovod needs that too. In the first round all are late.

    Attributes:
        index: Its number in the plan.
        name: Of its message, in Horovod's timeline.
        seconds: That the last message took, late or not; told to the other ranks in the next one.

    Args:
        index: The same.
        name: The same. Every rank must have it, also one whose plan alone has changed: it must still meet the others.
        slots: Of its segments, in the plan's order.
        exchange: Of the compression.
        digest: Of the plan.
        scratch: For all buckets.
        seed: Of encoding again the piece of a segment, by step and index.
    """  # noqa: D205

    def __init__(
        self,
        index: int,
        name: str,
        slots: list[Slot],
        exchange: Exchange,
        digest: int,
        scratch: Scratch,
        seed: Callable[[int, int], int],
    ) -> None:
        self.index, self.name = index, name
        self._exchange = exchange
        self._digest = digest
        self._segments = len(slots)
        self.seconds: dict[bool, float] = {}
        self._capacity = sum(slot.segment.codec.max_payload(slot.segment.parameter.numel) for slot in slots)
        self._writers: dict[bool, MessageWriter] = {}
        self._buffers: dict[bool, ChunkBuffers] = {}
        self._expected: set[Slot] = set()
        self._chunked: Chunked | None = None
        if slots[0].segment.exchange == SCATTER_GATHER and exchange.size > 0:
            parts = [(s.segment.index, s.segment.codec.kernel, s.segment.parameter.numel) for s in slots]
            by_index = {slot.segment.index: slot for slot in slots}
            self._chunked = Chunked(_kernels.Chunks(parts, exchange.size), by_index, digest, scratch, seed)
            for segment, begin, end in self._chunked.chunks.pieces(exchange.rank):
                by_index[segment].piece = (begin, end)

    def writer(self, late: bool) -> MessageWriter:
        """Where the payloads go."""
        if late not in self._writers:
            self._writers[late] = MessageWriter(self._capacity, self._segments)
        return self._writers[late]

    def clear(self) -> None:
        """Begins a round."""
        self._writers.pop(True, None)  # late segments are rare: after the first round their memory would lie idle
        self._buffers.pop(True, None)
        if False in self._writers:
            self._writers[False].clear()

    def arrive(self, slot: Slot, round: Round) -> bool:
        """Notes that a segment has come; returns whether it is late."""
        round.came[self.index].add(slot)
        return slot not in self._expected

    def is_full(self, round: Round) -> bool:
        """Whether every segment that was expected has come."""
        return self._expected <= round.came[self.index]

    def send(self, late: bool, round: Round, measured: Measured, check: Check) -> None:
        """Enqueues the message; `measured` is for encoding again."""
        writer = self.writer(late)
        writer.seconds = self.seconds.get(late, 0.0)
        if round.repeat:
            writer.flags |= Flags.REPEAT
        length = writer.finish(self._digest, round.step)
        name = self.name + (".late" if (self.index, False) in round.transfers else "")
        round.transfers[self.index, late] = self._transfer(name, writer.buffer[:length], late, round, measured, check)

    def _transfer(self, name: str, message: np.ndarray, late: bool, round: Round, measured: Measured, check: Check) -> Transfer:
        alone = all(transfer.is_done for transfer in round.transfers.values())
        if self._chunked is None:
            return Gather(self._exchange, name, message, alone, check)
        if late not in self._buffers:
            self._buffers[late] = ChunkBuffers(self._chunked.chunks, round.rank)
        return ScatterGather(self._exchange, name, message, alone, check, self._chunked, self._buffers[late], measured, round)

    def unsent(self, round: Round) -> list[bool]:
        """Which of the two messages, the late one or not, something has come for that was not sent."""
        came = {slot not in self._expected for slot in round.came[self.index]}
        return [late for late in sorted(came) if (self.index, late) not in round.transfers]

    def expect(self, round: Round) -> None:
        """Ends a round: what came in it is expected in the next."""
        if round.came[self.index]:
            self._expected = round.came[self.index]
