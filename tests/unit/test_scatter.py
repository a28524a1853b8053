"""Cutting payloads, chunks of a bucket, and what their owner does with them."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.helpers import decode, encode, guarded, guards_hold

from hvd_compress import PayloadError, _kernels
from hvd_compress.codecs import parse
from hvd_compress.codecs.base import Momentum
from hvd_compress.message import Flags, MessageWriter, read_messages
from hvd_compress.vector import Vector

SPECS = [
    "none",
    "fp16",
    "bf16",
    "adacomp:bin=7",
    "adacomp:bin=100",
    "qsgd:bits=4,bucket=512",
    "qsgdinf:bits=2,bucket=30",
    "nuqsgd:bits=3,bucket=1000",
    "nuqsgd:bits=3,bucket=100,coding=elias",
    "qsgd:bits=8,bucket=7,error_feedback=true",
    "qsgd:bits=auto,bucket=100,cost=bits",
    "onebit",
    "onebit:scale=l2",
    "topk:fraction=0.1",
    "randomk:fraction=0.1",
    "cat:cost=bits",
    "cat:scheme=topk+sign,cost=packets,pmax=100",
    "cat:scheme=stochastic,cost=packets,pmax=100",
]
SIZES = (0, 1, 5, 8, 100, 1000, 4099)


def normal(n, seed=0):
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)


def cut(codec, payload, n, begin, end, cursor=0):
    memory, out = guarded(codec.max_payload(end - begin), "uint8")
    size, cursor = codec.kernel.cut(payload.ctypes.data, payload.size, n, begin, end, cursor, out.ctypes.data)
    assert guards_hold(memory)
    return out[:size].copy(), cursor


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_pieces_of_a_payload_decode_to_what_they_decode_to_in_the_whole(spec, n, pieces):
    codec = parse(spec)
    grad = normal(n) * (np.arange(n) % 3 == 0)  # with stretches in which little is selected
    grad[n // 2 :] *= np.float32(1e-3)
    payload = encode(codec, grad).payload
    whole = decode(codec, payload, n)
    bounds = [n * k // pieces // codec.grain * codec.grain for k in range(pieces)] + [n]
    cursor = 0
    for begin, end in itertools.pairwise(bounds):
        piece, cursor = cut(codec, payload, n, begin, end, cursor)
        assert decode(codec, piece, end - begin).tobytes() == whole[begin:end].tobytes()


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not parse(spec).is_sparse and "auto" not in spec])
def test_cutting_adds_no_more_than_headers(spec):
    codec, n = parse(spec), 21_000  # a multiple of every bucket
    payload = encode(codec, normal(n)).payload
    pieces = [cut(codec, payload, n, n // 3 // codec.grain * codec.grain * k, n, 0)[0].size for k in range(2)]
    head = codec.max_payload(0) if codec.name != "onebit" else 8
    assert pieces[0] == payload.size
    assert pieces[1] == codec.max_payload(n - n // 3 // codec.grain * codec.grain)
    assert pieces[1] - head == pytest.approx((payload.size - head) * 2 / 3, abs=4 + codec.grain * 4)


@pytest.mark.parametrize("bin", [50, 100])
def test_a_piece_in_which_nothing_was_selected_is_a_header(bin):
    codec = parse(f"adacomp:bin={bin}")
    grad = np.zeros(1000, np.float32)
    grad[900:] = normal(100)
    payload = encode(codec, grad).payload
    nothing, cursor = cut(codec, payload, 1000, 0, 500)
    rest, _ = cut(codec, payload, 1000, 500, 1000, cursor)
    assert nothing.size == 8
    assert decode(codec, rest, 500).tobytes() == decode(codec, payload, 1000)[500:].tobytes()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_pieces_of_what_is_not_finite_are_not_finite(spec, value):
    codec, n = parse(spec), 1000
    grad = normal(n)
    grad[n - 1] = value
    payload = encode(codec, grad).payload
    middle = 500 // codec.grain * codec.grain
    cursor = cut(codec, payload, n, 0, middle)[1]
    piece, _ = cut(codec, payload, n, middle, n, cursor)
    assert not np.isfinite(decode(codec, piece, n - middle)).all()


@pytest.mark.parametrize("spec", SPECS)
def test_a_payload_that_was_cut_short_is_refused_or_cut_within_its_bounds(spec):
    codec, n = parse(spec), 1000
    payload = encode(codec, normal(n)).payload
    for size in (0, 4, 8, payload.size // 2, payload.size - 1):
        short = payload[:size].copy()
        middle = 500 // codec.grain * codec.grain
        try:
            cursor = cut(codec, short, n, 0, middle)[1]
            piece, _ = cut(codec, short, n, middle, n, cursor)
        except PayloadError:
            continue
        assert "adacomp" in spec  # whose words say where they end
        assert piece.size <= payload.size


# --- chunks


def chunks(segments, owners):
    return _kernels.Chunks([(index, parse(spec).kernel, n) for index, (spec, n) in segments.items()], owners)


@given(
    st.lists(st.tuples(st.sampled_from(SPECS), st.integers(0, 5000)), min_size=1, max_size=6),
    st.integers(1, 9),
)
def test_chunks_hold_every_element_once(parts, owners):
    segments = dict(enumerate(parts))
    made = chunks(segments, owners)
    seen = dict.fromkeys(segments, 0)
    last = 0
    for owner in range(owners):
        for index, begin, end in made.pieces(owner):
            assert begin == seen[index] < end
            assert end % parse(segments[index][0]).grain == 0 or end == segments[index][1]
            seen[index] = end
            assert index >= last  # in order, so that an owner has a stretch
            last = index
    assert seen == {index: n for index, (_, n) in segments.items()}


@pytest.mark.parametrize("owners", [2, 3, 4, 7])
def test_chunks_take_about_as_many_bytes_each(owners):
    segments = {0: ("onebit", 1_000_003), 1: ("qsgd:bits=4", 300_000), 5: ("onebit", 77), 6: ("onebit:scale=l2", 2_000_000)}
    made = chunks(segments, owners)
    total = sum(parse(spec).max_payload(n) for spec, n in segments.values())
    for owner in range(owners):
        size = sum(parse(segments[i][0]).max_payload(end - begin) for i, begin, end in made.pieces(owner))
        assert size == pytest.approx(total / owners, abs=600)  # a bucket of qsgd and headers


def test_more_owners_than_elements():
    made = chunks({3: ("onebit", 5), 4: ("onebit", 0)}, 4)
    assert sorted(made.pieces(owner) for owner in range(4)) == [[], [], [], [(3, 0, 5)]]


def message_of(segments, grads, flags=0, digest=7, step=2):
    """A rank's message of a bucket; segments without a gradient are not in it, those with None have no payload."""
    writer = MessageWriter(sum(parse(spec).max_payload(n) for spec, n in segments.values()), len(segments))
    writer.flags = Flags(flags)
    for index in reversed(list(grads)):  # as backward has them
        codec, grad = parse(segments[index][0]), grads[index]
        if grad is None:
            writer.add(index, 0)
            continue
        payload = encode(codec, grad).payload
        writer.room().owner[writer.buffer.size - writer.room().length :][: payload.size] = payload
        writer.add(index, payload.size)
    return writer.buffer[: writer.finish(digest, step)].copy()


def split(made, message):
    memory, out = guarded(made.split_room, "uint8")
    lengths = made.split(message.ctypes.data, message.size, out.ctypes.data)
    assert guards_hold(memory)
    return out, lengths


@pytest.mark.parametrize("owners", [1, 2, 3, 4])
@pytest.mark.parametrize("step", [2, 3])
def test_a_message_is_split_into_one_for_each_owner(owners, step):
    segments = {i: (spec, 2000 + i) for i, spec in enumerate(SPECS)}
    grads = {i: normal(n, i) for i, (_, n) in segments.items()}
    message = message_of(segments, grads, Flags.NONFINITE, digest=99, step=step)
    made = chunks(segments, owners)
    out, lengths = split(made, message)
    read = read_messages(out[: sum(lengths)], owners)
    whole = read_messages(message, 1)[0].payloads
    start = 0
    for owner, (received, length) in enumerate(zip(read, lengths, strict=True)):
        assert (received.flags, received.digest, received.step) == (Flags.NONFINITE, 99, step)
        assert length <= made.message_room(owner)
        assert list(received.payloads) == [index for index, _, _ in made.pieces(owner)]
        for index, begin, end in made.pieces(owner):
            codec, n = parse(segments[index][0]), segments[index][1]
            at, size = received.payloads[index]
            assert start <= at
            assert at + size <= start + length
            first, size_of_whole = whole[index]
            decoded = decode(codec, message[first : first + size_of_whole], n)
            assert decode(codec, out[at : at + size], end - begin).tobytes() == decoded[begin:end].tobytes()
        start += length


def test_segments_that_did_not_come_and_those_without_payload():
    segments = dict.fromkeys(range(4), ("onebit", 100))
    out, lengths = split(chunks(segments, 2), message_of(segments, {0: normal(100), 2: None, 3: normal(100)}))
    first, second = read_messages(out[: sum(lengths)], 2)
    assert {index: size for index, (_, size) in first.payloads.items()} == {0: 8 + 13}
    assert {index: size for index, (_, size) in second.payloads.items()} == {2: 0, 3: 8 + 13}


def test_a_message_without_payloads_is_split_into_headers():
    segments = {0: ("onebit", 100), 1: ("onebit", 100)}
    out, lengths = split(chunks(segments, 3), message_of(segments, {}, Flags.REPEAT))
    assert lengths == [MessageWriter.HEADER_BYTES] * 3
    assert [message.flags for message in read_messages(out[: sum(lengths)], 3)] == [Flags.REPEAT] * 3


# --- what the owner does


@pytest.mark.parametrize("spec", SPECS)
def test_encoding_again_is_encoding_the_mean(spec):
    codec, n, ranks = parse(spec), 1000, 3
    payloads = [encode(codec, normal(n, seed)).payload for seed in range(ranks)]
    mean = np.zeros(n, np.float32)
    for payload in payloads:
        mean += np.float32(1 / ranks) * decode(codec, payload, n)
    residual = normal(n, 9) if codec.has_residual else None
    expected = encode(codec, mean, residual, seed=0 if codec.shares_seed else 5)  # that of the payloads

    out, scratch, left = np.empty(codec.max_payload(n), np.uint8), np.empty(n, np.float32), np.empty(n, np.float32)
    residuals = (Vector.of(residual), Vector.of(left)) if codec.has_residual else (None, None)
    encoded = codec.encode_again([Vector.of(p) for p in payloads], 1 / ranks, *residuals, 5, Vector.of(scratch), Vector.of(out))
    assert out[: encoded.bytes].tobytes() == expected.payload.tobytes()
    assert encoded == expected.encoded
    if codec.has_residual:
        assert left.tobytes() == expected.residual.tobytes()


def test_a_damaged_payload_is_not_encoded_again():
    codec = parse("qsgd")
    payload = encode(codec, normal(100)).payload
    payload[10] ^= 1
    out, scratch = np.empty(codec.max_payload(100), np.uint8), np.empty(100, np.float32)
    with pytest.raises(PayloadError, match="checksum"):
        codec.encode_again([Vector.of(payload)], 1, None, None, 0, Vector.of(scratch), Vector.of(out))


# --- momentum


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_a_gradient_is_averaged_with_its_momentum(spec, dtype):
    codec, n = parse(spec), 2100
    grad, momentum = normal(n).astype(dtype), normal(n, 1)
    beta = np.float32(0.9)
    mean = (1 - beta) * grad.astype(np.float32) + beta * momentum
    residual = normal(n, 9) if codec.has_residual else None
    expected = encode(codec, mean, residual)
    out, left = np.empty(codec.max_payload(n), np.uint8), np.empty(n, np.float32)
    residuals = (Vector.of(residual), Vector.of(left)) if codec.has_residual else (None, None)
    with_momentum = Momentum(Vector.of(momentum), float(beta), float(1 - beta))
    encoded = codec.encode(Vector.of(grad), *residuals, 0, Vector.of(out), with_momentum)
    assert out[: encoded.bytes].tobytes() == expected.payload.tobytes()
    assert encoded == expected.encoded


def test_a_momentum_of_another_length_is_refused():
    codec = parse("qsgd")
    out = np.empty(codec.max_payload(4), np.uint8)
    with pytest.raises(ValueError, match="a momentum of 3 float32 for 4 elements"):
        codec.encode(Vector.of(normal(4)), None, None, 0, Vector.of(out), Momentum(Vector.of(normal(3)), 0.9, 0.1))
