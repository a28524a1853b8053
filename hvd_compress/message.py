"""One rank's bytes of one bucket: a header, then the payloads with their segments' indices.

Layout, little-endian: "HVDC", uint32 flags, uint64 digest of the plan, uint64 step, uint64 length in bytes, padding included;
then for each segment uint32 index, uint64 payload bytes, payload; then at most one byte of padding. The segments stand in the
order in which their gradients came, which differs between ranks.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import numpy as np

from hvd_compress._kernels import PayloadError
from hvd_compress.vector import Vector

WIRE_VERSION = 1
_HEADER = struct.Struct("<4sIQQQ")
_ENTRY = struct.Struct("<IQ")
_MAGIC = b"HVDC"


class Flags(enum.IntFlag):
    """What a rank has to say of its whole message."""

    NONFINITE = 1
    """A gradient held Inf or NaN: every rank undoes the step's residuals."""
    REPEAT = 2
    """There was no new gradient since the last step's result was handed out; there are no payloads."""


class Message(NamedTuple):
    """A message that was received.

    Attributes:
        flags: See `Flags`.
        digest: Of the sender's plan.
        step: The sender's number of this step.
        payloads: Offset in bytes and length of each segment's payload, by the segment's index.
    """

    flags: Flags
    digest: int
    step: int
    payloads: dict[int, tuple[int, int]]


class MessageWriter:
    """Collects one bucket's payloads, in memory that is kept from step to step.

    Args:
        capacity: Sum of the segments' largest payloads, in bytes.
        segments: How many they are at most.
    """

    HEADER_BYTES = _HEADER.size
    ENTRY_BYTES = _ENTRY.size
    """What a segment takes besides its payload."""

    def __init__(self, capacity: int, segments: int) -> None:
        self.buffer = np.empty(_HEADER.size + segments * _ENTRY.size + capacity + 1, np.uint8)
        self._bytes = self.buffer.data
        self._vector = Vector.of(self.buffer)
        self.clear()

    def clear(self) -> None:
        """Begins a message."""
        self._end = _HEADER.size
        self.flags = Flags(0)
        self.segments = 0

    def room(self) -> Vector:
        """Where the next payload is to be written."""
        start = self._end + _ENTRY.size
        return self._vector.slice(start, self._vector.length - start)

    def add(self, index: int, payload_bytes: int) -> None:
        """Takes the payload that was written to `room()`."""
        _ENTRY.pack_into(self._bytes, self._end, index, payload_bytes)
        self._end += _ENTRY.size + payload_bytes
        self.segments += 1

    def finish(self, digest: int, step: int) -> int:
        """Writes the header and returns the message's length in bytes.

        The length of every second step's message is padded by a byte, so that it is never that of the step before: Horovod
        then does not answer it from its response cache, which dies where another rank has called join().
        """
        length = self._end + step % 2
        self.buffer[self._end : length] = 0
        _HEADER.pack_into(self._bytes, 0, _MAGIC, int(self.flags), digest, step, length)
        return length


def read_messages(data: np.ndarray, ranks: int) -> list[Message]:
    """The messages of all ranks, which stand one behind the other in `data` (uint8).

    Raises:
        PayloadError: They are not what MessageWriter writes.
    """
    messages = []
    view = data.data
    start = 0
    for rank in range(ranks):
        if start + _HEADER.size > data.size:
            raise PayloadError(f"{data.size} bytes end in the header of rank {rank}'s message")
        magic, flags, digest, step, length = _HEADER.unpack_from(view, start)
        end = start + length
        if magic != _MAGIC or flags not in range(4) or length < _HEADER.size or end > data.size:
            raise PayloadError(f"rank {rank}'s message has a header that is none")
        payloads: dict[int, tuple[int, int]] = {}
        at = start + _HEADER.size
        while end - at > 1:
            if at + _ENTRY.size > end:
                raise PayloadError(f"rank {rank}'s message ends in the middle of a segment")
            index, size = _ENTRY.unpack_from(view, at)
            at += _ENTRY.size
            if size > end - at or index in payloads:
                raise PayloadError(f"rank {rank}'s message has segment {index} twice, or cut short")
            payloads[index] = (at, size)
            at += size
        messages.append(Message(Flags(flags), digest, step, payloads))
        start = end
    if start != data.size:
        raise PayloadError(f"{data.size - start} bytes follow the last rank's message")
    return messages
