"""Messages: written and read back, and damaged in every way."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress import PayloadError
from hvd_compress.message import Flags, Message, MessageWriter, read_messages
from hvd_compress.vector import Vector

HEADER, ENTRY = MessageWriter.HEADER_BYTES, MessageWriter.ENTRY_BYTES
U64 = st.integers(0, 2**64 - 1)


def write(writer, payloads, digest=7, step=0, flags=0, seconds=0.0):
    """The message as an array, payloads in the order given."""
    writer.clear()
    for index, payload in payloads.items():
        room = writer.room()
        start = room.address - Vector.of(writer.buffer).address
        assert room.dtype == "uint8"
        assert room.length >= len(payload)
        writer.buffer[start : start + len(payload)] = np.frombuffer(payload, np.uint8)
        writer.add(index, len(payload))
    writer.flags, writer.seconds = Flags(flags), seconds
    assert writer.segments == len(payloads)
    return writer.buffer[: writer.finish(digest, step)].copy()


def message(payloads, **header):
    return write(MessageWriter(sum(map(len, payloads.values())), len(payloads)), payloads, **header)


def contents(data, got):
    """A message without places: its payloads' bytes. Of its seconds all bits count."""
    payloads = {i: bytes(data[at : at + size]) for i, (at, size) in got.payloads.items()}
    return got._replace(seconds=float(got.seconds).hex(), payloads=payloads)


PAYLOADS = {5: b"abcdefgh", 0: b"", 3: b"xyz"}
SEVERAL = [(PAYLOADS, 4, 2), ({0: b"z", 3: b"", 5: b"HVDC"}, 4, 0), ({}, 4, 1)]


def several(steps=(4, 4, 4)):
    return [message(payloads, step=step, flags=flags) for (payloads, _, flags), step in zip(SEVERAL, steps, strict=True)]


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.integers(0, 2**32 - 1), st.binary(max_size=40), max_size=6),
            U64,
            U64,
            st.integers(0, 3),
            st.floats(0, 1e6, width=32),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_round_trip(ranks):
    data = np.concatenate([message(p, digest=d, step=s, flags=f, seconds=t) for p, d, s, f, t in ranks])
    got = read_messages(data, len(ranks))
    assert [contents(data, m) for m in got] == [Message(Flags(f), d, s, float(t).hex(), p) for p, d, s, f, t in ranks]
    assert [list(m.payloads) for m in got] == [list(p) for p, *_ in ranks]


def test_length_differs_from_step_to_step():
    sizes = [message(PAYLOADS, step=step).size for step in range(4)]
    least = HEADER + sum(ENTRY + len(payload) for payload in PAYLOADS.values())
    assert sizes == [least, least + 1, least, least + 1]


def test_header():
    data = message({1: b"ab"}, digest=0x1122334455667788, step=6, flags=1, seconds=0.25)
    assert bytes(data[:4]) == b"HVDC"
    assert data[4:8].view("<u4")[0] == 1
    assert data[8:24].view("<u8").tolist() == [0x1122334455667788, 6]
    assert data[24:28].view("<f4")[0] == 0.25
    assert data[28:36].view("<u8")[0] == data.size
    assert data[36:40].view("<u4")[0] == 1
    assert data[40:48].view("<u8")[0] == 2
    assert bytes(data[48:]) == b"ab"


def test_a_writer_is_used_again():
    writer = MessageWriter(100, 3)
    first = write(writer, PAYLOADS, step=1, flags=1)
    assert np.array_equal(write(writer, PAYLOADS, step=1, flags=1), first)
    writer.clear()
    assert writer.flags == Flags(0)
    assert writer.segments == 0
    assert np.array_equal(write(writer, {}, step=2), message({}, step=2))


def test_a_full_writer_has_room_for_its_capacity():
    writer = MessageWriter(11, 3)
    data = write(writer, PAYLOADS, step=1)
    assert data.size == writer.buffer.size


@pytest.mark.parametrize("size", [-1, 12])
def test_more_than_there_is_room_for_is_refused(size):
    with pytest.raises(ValueError, match=f"a payload of {size} bytes in a room of 11"):
        MessageWriter(10, 1).add(0, size)


@pytest.mark.parametrize("steps", [(4, 4, 4), (3, 3, 3), (3, 4, 5)])
def test_every_truncation_is_refused(steps):
    data = np.concatenate(several(steps))
    for length in range(data.size):
        with pytest.raises(PayloadError):
            read_messages(data[:length], 3)


@pytest.mark.parametrize("tail", [b"\0", b"\0\0", b"HVDC", bytes(HEADER), bytes(100)], ids=len)
def test_every_tail_is_refused(tail):
    data = np.concatenate([*several(), np.frombuffer(tail, np.uint8)])
    with pytest.raises(PayloadError):
        read_messages(data, 3)


def test_another_number_of_ranks_is_refused():
    data = np.concatenate(several())
    for ranks in (0, 1, 2, 4):
        with pytest.raises(PayloadError):
            read_messages(data, ranks)


@pytest.mark.parametrize("steps", [(4, 4, 4), (3, 3, 3)])
def test_every_flipped_bit_is_refused_or_shows(steps):
    parts = several(steps)
    data = np.concatenate(parts)
    expected = [contents(data, m) for m in read_messages(data, 3)]
    ends = np.cumsum([part.size for part in parts])
    padding = {int(end) - 1 for end, step in zip(ends, steps, strict=True) if step % 2}
    for bit in range(8 * data.size):
        changed = data.copy()
        changed[bit // 8] ^= 1 << bit % 8
        try:
            got = [contents(changed, m) for m in read_messages(changed, 3)]
        except PayloadError:
            continue
        assert (got == expected) == (bit // 8 in padding)


@settings(max_examples=300)
@given(st.data())
def test_mutations_raise_nothing_else(data):
    array = np.concatenate(several((3, 3, 3)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, array.size - 1))
        few = np.frombuffer(data.draw(st.binary(max_size=8)), np.uint8)
        array = np.concatenate([array[:at], few, array[at + data.draw(st.integers(0, 8)) :]])
        if array.size == 0:
            break
    try:
        messages = read_messages(array, 3)
    except PayloadError:
        return
    for got in messages:
        for at, size in got.payloads.values():
            assert HEADER <= at <= at + size <= array.size


@settings(max_examples=200)
@given(st.binary(max_size=200), st.integers(1, 3))
def test_random_bytes_are_refused(body, ranks):
    for data in (body, b"HVDC" + body):
        with pytest.raises(PayloadError):
            read_messages(np.frombuffer(data, np.uint8), ranks)


def damaged(where, dtype, value):
    data = message({1: b"ab", 2: b"cd"})
    data[where : where + np.dtype(dtype).itemsize].view(dtype)[0] = value
    return data


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (np.zeros(0, np.uint8), "0 bytes end in the header of rank 0"),
        (damaged(0, "<u4", 0), "rank 0's message has a header that is none"),
        (damaged(4, "<u4", 8), "a header that is none"),
        (damaged(28, "<u8", HEADER - 1), "a header that is none"),
        (damaged(28, "<u8", 2**64 - 1), "a header that is none"),
        (damaged(40, "<u8", 2**64 - 1), "segment 1 cut short"),
        (damaged(HEADER + ENTRY + 2, "<u4", 1), "segment 1 twice"),
        (damaged(28, "<u8", HEADER + ENTRY + 2 + 5), "in the middle of a segment"),
        (damaged(28, "<u8", HEADER), "28 bytes follow"),
    ],
)
def test_errors(data, text):
    with pytest.raises(PayloadError, match=text):
        read_messages(data, 1)
