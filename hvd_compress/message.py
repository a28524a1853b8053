"""One rank's bytes of one bucket: a header, then the payloads with their segments' indices. See csrc/message.h."""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np

from hvd_compress import _kernels
from hvd_compress.vector import Vector

WIRE_VERSION = 3


class Flags(enum.IntFlag):
    """What a rank has to say of its whole message."""

    NONFINITE = 1
    """A gradient held Inf or NaN: every rank undoes the step's residuals."""
    REPEAT = 2
    """There was no new gradient since the last step's result was handed out; there are no payloads."""
    DAMAGED = 4
    """What the rank was to encode again was damaged; there are no payloads."""


class Message(NamedTuple):
    """A message that was received.

    Attributes:
        flags: See `Flags`.
        digest: Of the sender's plan.
        step: The sender's number of this step.
        seconds: That the sender's last exchange under this name took; 0: not known.
        payloads: Offset in bytes and length of each segment's payload, by the segment's index.
    """

    flags: Flags
    digest: int
    step: int
    seconds: float
    payloads: dict[int, tuple[int, int]]


class MessageWriter:
    """Collects one bucket's payloads, in memory that is kept from step to step.

    Args:
        capacity: Sum of the segments' largest payloads, in bytes.
        segments: How many they are at most.
    """

    HEADER_BYTES = _kernels.HEADER_BYTES
    ENTRY_BYTES = _kernels.ENTRY_BYTES
    """What a segment takes besides its payload."""

    def __init__(self, capacity: int, segments: int) -> None:
        self.buffer = np.empty(self.HEADER_BYTES + segments * self.ENTRY_BYTES + capacity + 1, np.uint8)
        self._vector = Vector.of(self.buffer)
        self.clear()

    def clear(self) -> None:
        """Begins a message."""
        self._end = self.HEADER_BYTES
        self.flags = Flags(0)
        self.seconds = 0.0
        self.segments = 0

    def room(self) -> Vector:
        """Where the next payload is to be written."""
        start = self._end + self.ENTRY_BYTES
        return self._vector.slice(start, self._vector.length - start)

    def add(self, index: int, payload_bytes: int) -> int:
        """Takes the payload that was written to `room()`; returns by how much that lengthens the message."""
        room = self._vector.length - self._end - self.ENTRY_BYTES
        if not 0 <= payload_bytes <= room:
            raise ValueError(f"a payload of {payload_bytes} bytes in a room of {room}")
        _kernels.write_entry(self._vector.address + self._end, index, payload_bytes)
        self._end += self.ENTRY_BYTES + payload_bytes
        self.segments += 1
        # The header is counted with the first one.
        return self.ENTRY_BYTES + payload_bytes + (self.HEADER_BYTES if self.segments == 1 else 0)

    def finish(self, digest: int, step: int) -> int:
        """Writes the header and returns the message's length in bytes, a byte of padding included in every second step."""
        return _kernels.finish_message(self._vector.address, self._end, int(self.flags), digest, step, self.seconds)


def read_messages(data: np.ndarray, ranks: int) -> list[Message]:
    """The messages of all ranks, which stand one behind the other in `data` (uint8).

    Raises:
        PayloadError: They are not what MessageWriter writes.
    """
    vector = Vector.of(data)
    return [
        Message(Flags(flags), digest, step, seconds, payloads)
        for flags, digest, step, seconds, payloads in _kernels.read_messages(vector.address, vector.length, ranks)
    ]
