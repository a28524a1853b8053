"""Every codec on the values that break codecs: nothing, zeros, denormals, the largest numbers, Inf and NaN; and its errors."""

import numpy as np
import pytest
import torch
from unit.helpers import add, decode, decode_sum, encode, sealed

from hvd_compress.codecs import parse
from hvd_compress.vector import Vector

ADACOMP = ["adacomp:bin=50", "adacomp:bin=500"]
QUANTIZERS = [
    f"{kind}:bits={bits},bucket={bucket}{more}"
    for kind in ("qsgd", "qsgdinf", "nuqsgd")
    for bits, bucket in ((2, 100), (4, 512), (8, 100), ("auto", 512))
    for more in ("", ",coding=elias", ",error_feedback=true")
]
CASTS = ["none", "fp16", "bf16"]
ONEBIT = ["onebit:scale=l1", "onebit:scale=l2"]
SPARSIFIERS = [
    "topk:fraction=0.2",
    "topk:fraction=0.2,error_feedback=false",
    "randomk:fraction=0.1",
    "randomk:fraction=0.1,error_feedback=false",
    "cat:cost=bits",
    "cat:scheme=topk+sign,cost=time,latency=1e-6,bandwidth=1e9",
    "cat:scheme=stochastic,cost=packets,pmax=100",
]
SPECS = CASTS + ADACOMP + QUANTIZERS + ONEBIT + SPARSIFIERS
WIDE = [spec for spec in SPECS if spec != "fp16"]  # whose range is float32's
WITH_RESIDUAL = [spec for spec in SPECS if parse(spec).has_residual]
DTYPES = ("float16", "bfloat16", "float32", "float64")


def normal(n, seed=0):
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)


def mixed(n):
    """Magnitudes from 1e-38 to 1e38."""
    return (np.sign(normal(n)) * 10.0 ** np.random.default_rng(1).uniform(-38, 38, n)).astype(np.float32)


VALUES = {
    "one": np.array([-0.7], np.float32),
    "short": normal(13),
    "zeros": np.zeros(1200, np.float32),
    "minus zeros": np.full(1200, -0.0, np.float32),
    "constant": np.full(1200, 0.3, np.float32),
    "normal": normal(3001),
    "denormal": normal(1200) * np.float32(1e-40),
    "smallest": np.full(130, 1e-45, np.float32),
    "1e38": np.clip(normal(1200), -3, 3) * np.float32(1e38),
    "3e38": np.full(1200, -3e38, np.float32),
    "mixed": mixed(1200),
}


def to_bfloat16(values):
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def as_dtype(values, dtype):
    return to_bfloat16(values) if dtype == "bfloat16" else values.astype(dtype)


def as_float32(array):
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array.astype(np.float32)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("spec", WIDE)
def test_finite_values(spec, name):
    codec, v = parse(spec), VALUES[name]
    result = encode(codec, v, seed=9)
    decoded = decode(codec, result.payload, v.size)
    assert result.encoded.finite
    assert np.isfinite(decoded).all()
    assert ((decoded == 0) | (np.sign(decoded) == np.sign(v))).all()
    exact = v.astype(np.float64)
    larger = 10 if spec == "randomk:fraction=0.1,error_feedback=false" else 1 + 1e-2  # unbiased; bfloat16 rounds up
    assert np.abs(decoded).max() <= np.linalg.norm(exact) * larger
    if not np.any(v):
        assert not np.any(decoded)
    if codec.has_residual:
        np.testing.assert_allclose(result.residual, exact - decoded, rtol=1e-6, atol=1e-6 * np.abs(exact).max())
        assert np.isfinite(result.residual).all()


@pytest.mark.parametrize("spec", WITH_RESIDUAL)
@pytest.mark.parametrize("magnitude", [1e-40, 1e-25, 1.0, 1e25, 1e38])
def test_residual_norm_at_every_magnitude(spec, magnitude):
    v = np.clip(normal(1200), -3, 3) * np.float32(magnitude)
    result = encode(parse(spec), v)
    norm = np.linalg.norm(result.residual.astype(np.float64))
    assert result.encoded.residual_norm == pytest.approx(norm, rel=1e-3, abs=1e-3 * norm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS)
def test_nothing(spec, dtype):
    codec = parse(spec)
    result = encode(codec, np.empty(0, np.uint16 if dtype == "bfloat16" else dtype))
    assert result.payload.size > 0  # an empty tensor in an allgather hangs some backends
    assert result.encoded.finite
    assert result.encoded.residual_norm == 0
    assert decode(codec, result.payload, 0).size == 0


@pytest.mark.parametrize("spec", SPECS)
def test_nothing_at_address_zero(spec):
    """An empty torch tensor has no memory."""
    codec = parse(spec)
    nothing = Vector.of(np.empty(0, np.float32))._replace(address=0)
    residual = nothing if codec.has_residual else None
    out = np.empty(codec.max_payload(0), np.uint8)
    encoded = codec.encode(nothing, residual, residual, 0, Vector.of(out))
    codec.decode_add(Vector.of(out[: encoded.bytes]), 1.0, nothing)


@pytest.mark.parametrize("n", [0, 1, 7, 1000, 5003])
@pytest.mark.parametrize("spec", SPECS)
def test_a_sum_is_that_of_its_payloads(spec, n):
    codec = parse(spec)
    payloads = [encode(codec, normal(n, seed), seed=seed).payload for seed in range(3)]
    for count in range(4):
        added = np.zeros(n, np.float32)
        for payload in payloads[:count]:
            add(codec, payload, added, 0.25)
        assert np.array_equal(decode_sum(codec, payloads[:count], n, 0.25), added)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("spec", SPECS)
def test_dtypes_give_the_bytes_of_float32(spec, dtype):
    codec = parse(spec)
    values = np.concatenate([normal(2500), np.float32([0, -0.0, 6e-8, -6e-5, 6e4])])
    exact = np.random.default_rng(2).normal(size=777) if dtype == "float64" else as_dtype(normal(777), dtype)
    for grad in (as_dtype(values, dtype), exact, as_dtype(values, dtype)[1:18]):
        residual = normal(grad.size, seed=5) if codec.has_residual else None
        result, expected = (encode(codec, g, residual, seed=4) for g in (grad, as_float32(grad)))
        assert np.array_equal(result.payload, expected.payload)
        assert result.encoded == expected.encoded
        if codec.has_residual:
            assert np.array_equal(result.residual, expected.residual)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 600, 1234, 2999])
@pytest.mark.parametrize("spec", SPECS)
def test_not_finite(spec, place, bad):
    codec, n = parse(spec), 3000
    v = normal(n)
    v[place] = bad
    for dtype in DTYPES:
        result = encode(codec, as_dtype(v, dtype))
        assert not result.encoded.finite
    decoded = decode(codec, result.payload, n, weight=0.5)
    nan = np.zeros(n, bool)
    if spec in CASTS:
        nan[place] = True
        assert np.array_equal(decoded[place], v[place], equal_nan=True)
    elif spec in ADACOMP:
        nan[:] = True
        assert result.payload.size == 8
    elif spec in ONEBIT + SPARSIFIERS:
        nan[:] = True
    else:
        start = place // codec.bucket * codec.bucket
        nan[start : start + codec.bucket] = True
        assert np.isnan(decoded[nan]).all()
    assert not np.isfinite(decoded[nan]).any()
    assert np.isfinite(decoded[~nan]).all()


@pytest.mark.parametrize("spec", WITH_RESIDUAL)
@pytest.mark.parametrize(("value", "left"), [(1, np.nan), (1, np.inf), (np.inf, -np.inf), (3e38, 3e38)])
def test_not_finite_with_the_residual(spec, value, left):
    codec = parse(spec)
    v, residual = normal(1200), normal(1200)
    v[700], residual[700] = value, left
    result = encode(codec, v, residual)
    assert not result.encoded.finite
    assert np.isnan(decode(codec, result.payload, 1200)[700])


def test_float64_beyond_float32_is_not_finite():
    assert not encode(parse("qsgd"), np.array([1.0, 1e300])).encoded.finite


@pytest.mark.parametrize("weight", [1.0, 0.25, -3.0])
@pytest.mark.parametrize("spec", SPECS)
def test_decoding_adds(spec, weight):
    codec, n = parse(spec), 1111
    base = normal(n, seed=3)
    out, expected = base.copy(), base.astype(np.float64)
    for seed in range(3):
        payload = encode(codec, normal(n, seed=10 + seed), seed=seed).payload
        add(codec, payload, out, weight)
        expected += weight * decode(codec, payload, n).astype(np.float64)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16}


def torch_bits(values, dtype):
    return torch.from_numpy(values).to(dtype).view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("spec", TORCH)
def test_all_half_precision_patterns(spec):
    patterns = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(patterns.view(np.int16)).view(TORCH[spec]).float().numpy()
    out = np.full(patterns.size, -0.0, np.float32)  # to which every number, 0 and -0 included, is added exactly
    add(parse(spec), sealed(patterns.tobytes()), out)
    loaded = encode(parse("none"), patterns if spec == "bf16" else patterns.view(np.float16)).payload[4:].view("<f4")
    number = ~np.isnan(expected)
    for got in (out, loaded):
        assert np.array_equal(np.isnan(got), ~number)
        assert np.array_equal(got.view(np.uint32)[number], expected.view(np.uint32)[number])


def float32_patterns():
    rng = np.random.default_rng(0)
    every = [rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint32)]
    for half in range(0, 1 << 16, 7):  # around what half precision can hold, and around the ties between
        for value in np.array([half], np.uint16).view(np.float16).astype(np.float32).view(np.uint32):
            every.append(value + np.array([-1, 0, 1, 0xFFF, 0x1000, 0x1001], np.int64).astype(np.uint32))
    every.append(rng.integers(0, 1 << 16, 4000, dtype=np.uint32)[:, None].repeat(4, 1).ravel() << 16 | 0x7FFF)
    every[-1][1::4] += 1
    every[-1][2::4] += 2
    small = (rng.normal(size=1 << 16) * 10.0 ** rng.uniform(-9, 5.5, 1 << 16)).astype(np.float32)
    return np.concatenate([*every, small.view(np.uint32)]).view(np.float32)


@pytest.mark.parametrize("spec", TORCH)
def test_rounding_to_half_precision(spec):
    values = float32_patterns()
    got = encode(parse(spec), values).payload[4:].view("<u2")
    number = ~np.isnan(values)
    assert np.array_equal(got[number], torch_bits(values, TORCH[spec])[number])
    back = torch.from_numpy(got[~number].view(np.int16)).view(TORCH[spec]).float()
    assert torch.isnan(back).all()


class TestErrors:
    n = 100
    f32 = Vector.of(np.zeros(100, np.float32))
    other = Vector.of(np.zeros(100, np.float32))

    def encode(self, spec, grad=None, before=None, after=None, out=None):
        codec = parse(spec)
        room = np.zeros(codec.max_payload(self.n), np.uint8)
        codec.encode(grad or self.f32, before, after, 0, out or Vector.of(room))

    @pytest.mark.parametrize("spec", SPECS)
    def test_gradient_dtype(self, spec):
        with pytest.raises(ValueError, match=r"gradient of dtype int32.*float16, bfloat16, float32, float64"):
            self.encode(spec, grad=self.f32._replace(dtype="int32"))

    @pytest.mark.parametrize("spec", WITH_RESIDUAL)
    def test_residual_missing(self, spec):
        for before, after in ((None, None), (self.f32, None), (None, self.f32)):
            with pytest.raises(ValueError, match="needs a residual"):
                self.encode(spec, before=before, after=after)

    @pytest.mark.parametrize("spec", sorted(set(SPECS) - set(WITH_RESIDUAL)))
    def test_residual_one_too_many(self, spec):
        for before, after in ((self.f32, self.other), (self.f32, None), (None, self.other)):
            with pytest.raises(ValueError, match="has no residual"):
                self.encode(spec, before=before, after=after)

    @pytest.mark.parametrize("spec", WITH_RESIDUAL)
    def test_residual_of_another_kind(self, spec):
        for wrong in (self.other._replace(length=99), self.other._replace(dtype="float64")):
            for before, after in ((wrong, self.f32), (self.f32, wrong)):
                with pytest.raises(ValueError, match=f"residual of {wrong.length} {wrong.dtype}.*100 float32"):
                    self.encode(spec, before=before, after=after)

    @pytest.mark.parametrize("spec", WITH_RESIDUAL)
    @pytest.mark.parametrize("shift", [0, 1, 99, -50])
    def test_residuals_overlap(self, spec, shift):
        memory = Vector.of(np.zeros(300, np.float32))
        with pytest.raises(ValueError, match="overlap"):
            self.encode(spec, before=memory.slice(100, 100), after=memory.slice(100 + shift, 100))

    @pytest.mark.parametrize("spec", SPECS)
    def test_room(self, spec):
        codec = parse(spec)
        residuals = (self.f32, self.other) if codec.has_residual else (None, None)
        room = Vector.of(np.zeros(codec.max_payload(self.n), np.uint8))
        for wrong in (room._replace(length=room.length - 1), room._replace(dtype="float32")):
            with pytest.raises(ValueError, match=f"room for {wrong.length} {wrong.dtype}.*can take {room.length} uint8"):
                self.encode(spec, None, *residuals, out=wrong)

    @pytest.mark.parametrize("spec", SPECS)
    def test_decoding(self, spec):
        payload = Vector.of(encode(parse(spec), np.zeros(100, np.float32)).payload)
        for wrong, out in ((payload._replace(dtype="float32"), self.f32), (payload, self.f32._replace(dtype="float64"))):
            with pytest.raises(ValueError, match=f"not {wrong.dtype} into {out.dtype}"):
                parse(spec).decode_add(wrong, 1.0, out)
            with pytest.raises(ValueError, match=f"not {wrong.dtype} into {out.dtype}"):
                parse(spec).decode([wrong], 1.0, out)
        with pytest.raises(ValueError, match="into float64"):
            parse(spec).decode([], 1.0, self.f32._replace(dtype="float64"))

    def test_bin_that_no_shape_has_chosen(self):
        with pytest.raises(ValueError, match=r"adacomp without bin.*shape"):
            self.encode("adacomp", before=self.f32, after=self.other)

    def test_slices(self):
        array = np.zeros(10, np.float32)
        part = Vector.of(array).slice(3, 4)
        assert part == Vector.of(array[3:7])._replace(owner=array)
        assert part.owner is array
        for start, length in ((-1, 2), (0, 101), (99, 2), (5, -1)):
            with pytest.raises(ValueError, match="vector of 100"):
                self.f32.slice(start, length)
        with pytest.raises(ValueError, match="contiguous"):
            Vector.of(np.zeros(10)[::2])
