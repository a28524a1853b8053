"""How a bucket's message travels: gathered, or scattered and gathered."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hvd_compress import _kernels
from hvd_compress._kernels import PayloadError
from hvd_compress.codecs.base import Measured
from hvd_compress.message import Flags, Message, MessageWriter, read_messages
from hvd_compress.torch.exchange import Exchange, Pending
from hvd_compress.torch.memory import Scratch
from hvd_compress.torch.slot import Slot
from hvd_compress.vector import Vector

if TYPE_CHECKING:
    from hvd_compress.torch.round import Round

Check = Callable[[list[Message]], None]
"""Raises MismatchError where messages are not of this plan and step; notes what their flags say."""


class Received:
    """The messages of all ranks, one behind the other."""

    def __init__(self, data: np.ndarray, ranks: int) -> None:
        self._bytes = Vector.of(data)
        self.size = data.size
        self.messages = read_messages(data, ranks)

    def payloads(self, ranks: Iterable[int], slot: Slot) -> list[Vector]:
        """What ranks sent of a segment, where there is something to add.

        Raises:
            PayloadError: One should have sent something.
        """
        found = []
        for rank in ranks:
            message = self.messages[rank]
            place = message.payloads.get(slot.segment.index)
            if place is None and message.flags & Flags.DAMAGED:
                raise PayloadError(f"what rank {rank} received was damaged")
            if place is None and not message.flags & Flags.REPEAT:
                raise PayloadError(f"rank {rank} sent no payload for {slot.name!r}")
            if place is not None and place[1] > 0:
                found.append(self._bytes.slice(*place))
        return found

    @property
    def is_repeat(self) -> bool:
        """Whether no rank had a new gradient."""
        return all(message.flags & Flags.REPEAT for message in self.messages)


class Transfer(ABC):
    """One message under way, sent when this is made.

    Attributes:
        waited_s: Seconds that were waited for it.
        seconds: That it took; 0 where that is not known, since it was done when the result was asked for, or not alone.
        said: That the last exchange under this name took, by rank.
        bytes: Of one rank's message, on average.

    Args:
        alone: No other was under way when it was sent.
    """

    def __init__(self, alone: bool) -> None:
        self.waited_s = 0.0
        self.seconds = 0.0
        self.said: list[float] = []
        self.bytes = 0.0
        self._result: Received | None = None
        self._alone, self._sent_at = alone, time.perf_counter()

    def wait(self) -> Received:
        """Waits until the result is there, and parses it."""
        if self._result is None:
            self._result = self._wait()
        return self._result

    def advance(self) -> None:  # noqa: B027 (there may be nothing to do)
        """Goes on as far as it goes without waiting."""

    def go_on(self) -> None:  # noqa: B027
        """Goes on to the last phase, and waits for those before."""

    @property
    def is_done(self) -> bool:
        """Whether the result is there."""
        return self.finish(0)

    def _wait_for(self, pending: Pending) -> np.ndarray:
        """Waits for what is the end of it."""
        was_done, start = pending.poll(), time.perf_counter()
        data = pending.wait()
        now = time.perf_counter()
        self.waited_s += now - start
        if self._alone and not was_done:
            self.seconds = now - self._sent_at
        return data

    @abstractmethod
    def finish(self, seconds: float) -> bool:
        """Waits so long at most for an end that nobody asks for the result of; returns whether it has come."""

    @abstractmethod
    def drain(self) -> None:
        """Waits without asking for the result; where it has failed already, that was said then."""

    @abstractmethod
    def decode(self, slot: Slot, factor: float, out: Vector) -> None:
        """Writes `factor` times the mean of a segment to `out`. Raises PayloadError where a payload is damaged or missing."""

    @abstractmethod
    def _wait(self) -> Received: ...


class Gather(Transfer):
    """Every rank gets the messages of all."""

    def __init__(self, exchange: Exchange, name: str, message: np.ndarray, alone: bool, check: Check) -> None:
        super().__init__(alone)
        self._ranks = exchange.size
        self._check = check
        self._pending = exchange.allgather_async(name, message)

    def finish(self, seconds: float) -> bool:
        """See `Transfer`."""
        return self._pending.poll(seconds)

    def drain(self) -> None:
        """See `Transfer`."""
        self._pending.wait()

    def decode(self, slot: Slot, factor: float, out: Vector) -> None:
        """See `Transfer`."""
        payloads = self.wait().payloads(range(self._ranks), slot)
        slot.segment.codec.decode(payloads, factor / self._ranks, out)

    def _wait(self) -> Received:
        received = Received(self._wait_for(self._pending), self._ranks)
        self._check(received.messages)
        self.said = [message.seconds for message in received.messages]
        self.bytes = received.size / self._ranks
        return received


class ChunkBuffers:
    """Memory of a scatter-gather, which is kept from step to step."""

    def __init__(self, chunks: _kernels.Chunks, rank: int) -> None:
        self.split = np.empty(chunks.split_room, np.uint8)
        self.writer = MessageWriter(chunks.message_room(rank), len(chunks.pieces(rank)))


class Chunked(NamedTuple):
    """What the scatter-gathers of a bucket have in common.

    Attributes:
        chunks: See csrc/scatter.h.
        slots: Of the bucket's segments, by index.
        digest: Of the plan.
        scratch: For the mean of a piece.
        seed: Of encoding again the piece of a segment, by step and index.
    """

    chunks: _kernels.Chunks
    slots: Mapping[int, Slot]
    digest: int
    scratch: Scratch
    seed: Callable[[int, int], int]


class ScatterGather(Transfer):
    """Every rank gets its chunk of the messages of all, and sends the mean of it, encoded again, to all: see csrc/scatter.h.

    Args:
        exchange: Of the compression.
        name: Begins the names of the two operations.
        message: Of this rank, with all segments' payloads.
        alone: See `Transfer`.
        check: See `Check`.
        bucket: Of the bucket.
        buffers: Of this transfer alone.
        measured: What sending costs.
        round: What was sent is counted in its record; residuals that change are marked with it.
    """

    def __init__(
        self,
        exchange: Exchange,
        name: str,
        message: np.ndarray,
        alone: bool,
        check: Check,
        bucket: Chunked,
        buffers: ChunkBuffers,
        measured: Measured,
        round: Round,
    ) -> None:
        super().__init__(alone)
        self._exchange, self._name, self._check = exchange, name, check
        self._ranks, self._rank = round.size, round.rank
        self._bucket, self._writer, self._measured, self._round = bucket, buffers.writer, measured, round
        lengths = bucket.chunks.split(Vector.of(message).address, message.size, Vector.of(buffers.split).address)
        sent = buffers.split[: sum(lengths)]
        self._count_split(sent)
        self._scattered = exchange.alltoall_async(name, sent, lengths)
        self._gathered: Pending | None = None
        self._damage: PayloadError | None = None

    def advance(self) -> None:
        """See `Transfer`."""
        if self._gathered is None and self._scattered.poll():
            self.go_on()

    def go_on(self) -> None:
        """See `Transfer`."""
        if self._gathered is not None:
            return
        start = time.perf_counter()
        data = self._scattered.wait()
        self.waited_s += time.perf_counter() - start
        self._writer.clear()
        try:
            received = Received(data, self._ranks)
            self._check(received.messages)
            self.said = [message.seconds for message in received.messages]
            self._encode_again(received)
        except PayloadError as error:  # the others wait for this rank's message
            self._damage = error
            self._writer.clear()
            self._writer.flags = Flags.DAMAGED
        length = self._writer.finish(self._bucket.digest, self._round.step)
        self._gathered = self._exchange.allgather_async(f"{self._name}.mean", self._writer.buffer[:length])

    def finish(self, seconds: float) -> bool:
        """See `Transfer`."""
        if not self._scattered.poll(seconds):
            return False
        return self._last().poll(seconds)

    def drain(self) -> None:
        """See `Transfer`."""
        self._last().wait()

    def decode(self, slot: Slot, factor: float, out: Vector) -> None:
        """See `Transfer`."""
        received = self.wait()
        for owner in range(self._ranks):
            for index, begin, end in self._bucket.chunks.pieces(owner):
                if index == slot.segment.index:
                    slot.segment.codec.decode(received.payloads([owner], slot), factor, out.slice(begin, end - begin))

    def _wait(self) -> Received:
        data = self._wait_for(self._last())
        if self._damage is not None:
            raise self._damage
        received = Received(data, self._ranks)
        self._check(received.messages)
        self.bytes = received.size  # what all have encoded again is about as large as what one of them has encoded
        return received

    def _last(self) -> Pending:
        self.go_on()
        assert self._gathered is not None
        return self._gathered

    def _encode_again(self, received: Received) -> None:
        writer = self._writer
        if received.is_repeat:
            writer.flags |= Flags.REPEAT
        for index, begin, end in self._bucket.chunks.pieces(self._rank):
            slot = self._bucket.slots[index]
            if not any(index in message.payloads for message in received.messages):
                continue  # it is not in this message
            start = time.perf_counter()
            payloads = received.payloads(range(self._ranks), slot)
            size = 0
            slot.piece_residual.round = self._round
            if payloads:
                seed, scratch = self._bucket.seed(self._round.step, index), self._bucket.scratch.floats(end - begin)
                encoded = slot.encode_again(payloads, 1 / self._ranks, seed, scratch, writer.room(), self._measured)
                size = encoded.bytes
                if not encoded.finite:
                    writer.flags |= Flags.NONFINITE
            else:
                slot.piece_residual.keep()
            counters = self._round.record.of(slot.name)
            counters.bytes_sent += (self._ranks - 1) * writer.add(index, size)
            counters.encode_s += time.perf_counter() - start

    def _count_split(self, sent: np.ndarray) -> None:
        for owner, message in enumerate(read_messages(sent, self._ranks)):
            if owner == self._rank:
                continue
            head = MessageWriter.HEADER_BYTES
            for index, (_, size) in message.payloads.items():
                self._round.record.of(self._bucket.slots[index].name).bytes_sent += head + MessageWriter.ENTRY_BYTES + size
                head = 0
