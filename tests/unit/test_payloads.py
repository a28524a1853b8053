"""Payloads that no encoder wrote: refused, or decoded into `out` alone, whose guards `helpers.add` checks."""

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.helpers import add, decode, encode, sealed

from hvd_compress import PayloadError
from hvd_compress.codecs import parse

SPECS = [
    "none",
    "fp16",
    "bf16",
    "adacomp:bin=4",
    "adacomp:bin=63",
    "adacomp:bin=100",
    "onebit",
    "topk:fraction=0.1",
    "topk:fraction=0.6",
    "randomk:fraction=0.1",
    "cat:scheme=topk",
    "cat:scheme=topk+sign,cost=packets,pmax=100",
    "cat:scheme=stochastic,cost=packets,pmax=100",
    *(
        f"{kind}:bits={bits},bucket={bucket},coding={coding}"
        for kind in ("qsgd", "qsgdinf", "nuqsgd")
        for bits, bucket in ((2, 7), (3, 600), (8, 32))
        for coding in ("fixed", "elias")
    ),
]
FUZZED = [*SPECS, "adacomp:bin=16383", "nuqsgd:bits=3,bucket=2147483647,coding=elias", "qsgd:bits=5,bucket=2147483647"]
SIZES = (0, 1, 5, 70)


def values(n, seed=0):
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)


def payload_of(spec, n, seed=0):
    return encode(parse(spec), values(n, seed), seed=seed).payload


def refused(spec, payload, n):
    """It raises, and for a wrong checksum or length nothing is written."""
    out = values(n, seed=99)
    before = out.copy()
    with pytest.raises(PayloadError):
        add(parse(spec), payload, out)
    assert np.array_equal(out, before)


def survived(spec, payload, n):
    """Whether it was decoded; it may be refused, but neither may anything else be raised, nor a guard be touched."""
    with contextlib.suppress(PayloadError):
        add(parse(spec), payload, np.zeros(n, np.float32))
        decode(parse(spec), payload, n)  # never refuses what the other takes
        return True
    return False


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("spec", SPECS)
def test_every_truncation_is_refused(spec, n):
    payload = payload_of(spec, n)
    for length in range(payload.size):
        refused(spec, payload[:length], n)


@pytest.mark.parametrize("tail", [b"\0", b"\xff", b"\0\0\0\0", b"\0" * 64, bytes(range(64))], ids=len)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("spec", SPECS)
def test_every_lengthening_is_refused(spec, n, tail):
    payload = np.concatenate([payload_of(spec, n), np.frombuffer(tail, np.uint8)])
    refused(spec, payload, n)
    refused(spec, np.concatenate([payload, payload]), n)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("spec", SPECS)
def test_every_flipped_bit_is_refused(spec, n):
    payload = payload_of(spec, n)
    for bit in range(8 * payload.size):
        changed = payload.copy()
        changed[bit // 8] ^= 1 << bit % 8
        refused(spec, changed, n)


@pytest.mark.parametrize("spec", SPECS)
def test_random_bytes_are_refused(spec):
    rng = np.random.default_rng(0)
    for length in [*range(40), 100, 500, 4096]:
        for _ in range(3):
            refused(spec, rng.integers(0, 256, length, np.uint8), 70)


@pytest.mark.parametrize("spec", SPECS)
def test_two_swapped_words_are_refused(spec):
    payload = payload_of(spec, 1000)
    for distance in (4, 64):  # neighbours, and words that the checksum has in one lane
        changed = payload.copy()
        changed[4:8], changed[4 + distance : 8 + distance] = payload[4 + distance : 8 + distance], payload[4:8]
        if not np.array_equal(changed, payload):
            refused(spec, changed, 1000)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("spec", SPECS)
def test_sealed_truncations_and_tails(spec, n):
    body = payload_of(spec, n)[4:]
    for length in range(body.size):
        assert not survived(spec, sealed(body[:length]), n) or (spec.startswith("adacomp") and length == 4)
    for tail in (b"\0", b"\xff", b"\0\0", b"\0" * 64):
        assert not survived(spec, sealed(body.tobytes() + tail), n)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("spec", SPECS)
def test_sealed_flips(spec, n):
    body = payload_of(spec, n)[4:]
    for bit in range(8 * body.size):
        changed = body.copy()
        changed[bit // 8] ^= 1 << bit % 8
        decoded = survived(spec, sealed(changed), n)
        # The others have no wrong bytes, only other numbers.
        assert decoded or spec.startswith(("adacomp", "topk", "cat")) or "elias" in spec


@pytest.mark.parametrize("spec", FUZZED)
@settings(max_examples=60)
@given(body=st.binary(max_size=300), n=st.integers(0, 300))
def test_sealed_random_bytes(spec, body, n):
    survived(spec, sealed(body), n)


@pytest.mark.parametrize("spec", FUZZED)
@settings(max_examples=60)
@given(data=st.data(), n=st.integers(0, 300), decoded_n=st.integers(0, 300))
def test_sealed_mutations(spec, data, n, decoded_n):
    """A valid payload with some bytes replaced, removed or repeated, decoded for perhaps another n."""
    body = bytearray(payload_of(spec, n)[4:])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    survived(spec, sealed(body), decoded_n)


@pytest.mark.parametrize("spec", [spec for spec in FUZZED if "fixed" in spec or "elias" not in spec])
def test_another_length_is_refused(spec):
    payload = payload_of(spec, 1000)
    for n in (0, 1, 500, 999 if spec.startswith(("none", "fp16", "bf16")) else 990, 1100, 100_000):
        if spec == "adacomp:bin=16383" and n > 500:  # one bin: no word tells how long it is
            survived(spec, payload, n)
        else:
            with pytest.raises(PayloadError):
                decode(parse(spec), payload, n)


class TestAdaCompWords:
    """Each rule of the format, broken on its own. n = 10 in bins of 4: three bins, the last one of two elements."""

    LAST, SIGN, EMPTY = 0x40, 0x80, 0x3F

    def decode(self, *words, scale=0.5, n=10):
        return decode(parse("adacomp:bin=4"), sealed(np.float32(scale).tobytes() + bytes(words)), n)

    def test_right(self):
        last, sign, empty = self.LAST, self.SIGN, self.EMPTY
        decoded = self.decode(0, 3 | last | sign, empty | last, 1 | last)
        assert decoded.tolist() == [0.5, 0, 0, -0.5, 0, 0, 0, 0, 0, 0.5]

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            ((0 | LAST, 0 | LAST), "ends before its last bin"),
            ((0 | LAST, 0 | LAST, 0), "ends before its last bin"),
            ((0 | LAST, 0 | LAST, 0 | LAST, 0 | LAST), "words behind its last bin"),
            ((4 | LAST, 0 | LAST, 0 | LAST), "index 4 in a bin of 4"),
            ((0 | LAST, 0 | LAST, 2 | LAST), "index 2 in a bin of 2"),
            ((1, 1 | LAST, 0 | LAST, 0 | LAST), "not above the one before"),
            ((2, 1 | LAST, 0 | LAST, 0 | LAST), "not above the one before"),
            ((EMPTY, 0 | LAST, 0 | LAST), "empty bin that is not empty"),
            ((1, EMPTY | LAST, 0 | LAST, 0 | LAST), "empty bin that is not empty"),
        ],
    )
    def test_wrong(self, words, text):
        with pytest.raises(PayloadError, match=text):
            self.decode(*words)

    @pytest.mark.parametrize("scale", [np.inf, -np.inf])
    def test_scale_that_is_not_finite(self, scale):
        with pytest.raises(PayloadError, match="not finite"):
            self.decode(scale=scale)
        with pytest.raises(PayloadError, match="not finite"):
            self.decode(0 | self.LAST, 0 | self.LAST, 0 | self.LAST, scale=np.nan)

    def test_words_of_a_layer_without_elements(self):
        with pytest.raises(PayloadError, match="behind its last bin"):
            self.decode(0 | self.LAST, n=0)

    def test_half_a_word(self):
        with pytest.raises(PayloadError, match="whole words"):
            decode(parse("adacomp:bin=64"), sealed(bytes(4) + b"\0"), 64)
        with pytest.raises(PayloadError, match="whole words"):
            decode(parse("adacomp:bin=64"), sealed(bytes(3)), 64)


class TestEliasBits:
    """One bucket of 4 values, levels 0..3."""

    def decode(self, bits, norm=1.0):
        text = f"{np.float32(norm).view(np.uint32):032b}" + bits.replace(" ", "")
        text += "0" * (-len(text) % 8)
        body = bytes(int(text[i : i + 8], 2) for i in range(0, len(text), 8))
        return decode(parse("qsgd:bits=3,bucket=4,coding=elias"), sealed(body), 4)

    def test_right(self):
        assert self.decode("110  0 1 110  110 0 0").tolist() == [-1, 0, 0, np.float32(1) / np.float32(3)]

    @pytest.mark.parametrize(
        ("bits", "text"),
        [
            ("10 110 0", "more nonzeros"),  # 5 of 4
            ("100  10 101 0  0 0", "out of range"),  # distance 5
            ("110  0 0 0  101000 0 0", "out of range"),  # distance 1, then 4
            ("100  0 0 101000", "out of range"),  # level 4
            ("0 1", "goes on"),
            ("0 0000 00000000", "goes on"),
            ("100  0 0 111", "middle of a code"),
            ("11 1111 1111111111111111 1", "more than 32 bits"),
            ("1" * 64, "more than 32 bits"),
        ],
    )
    def test_wrong(self, bits, text):
        with pytest.raises(PayloadError, match=text):
            self.decode(bits)
