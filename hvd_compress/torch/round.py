"""A round, from the first `compress` of a step to its last `decompress`, and the buckets that are filled in it."""

from __future__ import annotations

from collections import defaultdict

import torch

from hvd_compress.message import Flags, MessageWriter
from hvd_compress.stats import Record
from hvd_compress.torch.exchange import Exchange, InFlight, StandIn
from hvd_compress.torch.slot import Slot


class Round:
    """What one step has so far."""

    def __init__(self, step: int, exchange: Exchange, repeat: bool, scale: float) -> None:
        self.step = step
        self.size, self.rank = exchange.size, exchange.rank
        self.stand_in = StandIn.make(self.rank, self.size)
        self.scale = scale  # of the loss
        self.repeat = repeat  # there is no new gradient since the round before
        self.slots: set[Slot] = set()
        self.open = 0  # contexts that were not decompressed yet
        self.flushed = False
        self.nonfinite = False
        self.came: defaultdict[int, set[Slot]] = defaultdict(set)  # by bucket
        self.messages: dict[tuple[int, bool], InFlight] = {}  # by bucket, and whether of its late segments
        self.record = Record()


class Context:
    """What `decompress` needs of one `compress`."""

    def __init__(self, round: Round, slot: Slot, grad: torch.Tensor) -> None:
        self.round = round
        self.slot = slot
        self.grad = grad
        self.flat: torch.Tensor | None = None  # the gradient's own memory, where it can be written to in order
        self.sample: torch.Tensor | None = None  # of it, in one segment of each message, to notice that it was changed
        self.late = False


class Bucket:
    """Segments that travel in one message.

    It is sent when every segment has come that came in the round before: a parameter that is frozen, or belongs to another
    optimizer, never comes. One that comes unexpectedly is late: late ones go into a second message, when all gradients are
    there. Both are the same on all ranks, since Horovod needs that too. In the first round all are late.
    """

    def __init__(self, index: int, slots: list[Slot]) -> None:
        self._index = index
        self._segments = len(slots)
        self._capacity = sum(slot.segment.codec.max_payload(slot.segment.parameter.numel) for slot in slots)
        self._writers: dict[bool, MessageWriter] = {}
        self._expected: set[Slot] = set()

    def writer(self, late: bool) -> MessageWriter:
        """Where the payloads go."""
        if late not in self._writers:
            self._writers[late] = MessageWriter(self._capacity, self._segments)
        return self._writers[late]

    def clear(self) -> None:
        """Begins a round."""
        self._writers.pop(True, None)  # late segments are rare: after the first round their memory would lie idle
        if False in self._writers:
            self._writers[False].clear()

    def arrive(self, slot: Slot, round: Round) -> bool:
        """Notes that a segment has come; returns whether it is late."""
        round.came[self._index].add(slot)
        return slot not in self._expected

    def is_full(self, round: Round) -> bool:
        """Whether every segment that was expected has come."""
        return self._expected <= round.came[self._index]

    def send(self, late: bool, round: Round, exchange: Exchange, digest: int) -> None:
        """Enqueues the message."""
        writer = self.writer(late)
        if round.repeat:
            writer.flags |= Flags.REPEAT
        length = writer.finish(digest, round.step)
        # Only a second message has another name: a rank whose plan alone has changed must still meet the others.
        name = f"bucket.{self._index}" + (".late" if (self._index, False) in round.messages else "")
        round.messages[self._index, late] = InFlight(exchange, name, writer.buffer[:length], round.size)

    def flush(self, round: Round, exchange: Exchange, digest: int) -> None:
        """Enqueues what has come and was not sent."""
        came = round.came[self._index]
        for late in (False, True):
            if (self._index, late) not in round.messages and any((slot not in self._expected) == late for slot in came):
                self.send(late, round, exchange, digest)

    def expect(self, round: Round) -> None:
        """Ends a round: what came in it is expected in the next."""
        if round.came[self._index]:
            self._expected = round.came[self._index]
