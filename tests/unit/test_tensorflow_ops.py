"""One kernel for both frameworks: the same gradient, residual and seed give the same bytes and the same decoded vector."""

import numpy as np
import pytest
import torch
from unit.helpers import decode, encode

from hvd_compress import _kernels
from hvd_compress.codecs import parse

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")
from hvd_compress.tensorflow import ops  # noqa: E402

SPECS = [
    "none",
    "fp16",
    "bf16",
    "adacomp:bin=50",
    "adacomp:bin=500,c=1.5",
    *(
        f"{name}:bits={bits},bucket=100{rest}"
        for name in ("qsgd", "qsgdinf", "nuqsgd")
        for bits in (2, 4, 8)
        for rest in ("", ",coding=elias", ",feedback=true")
    ),
]
COUNTER = (7, 2, 3, 5)


def in_tensorflow(codec, grad, residual):
    counter = tf.constant(COUNTER, tf.int64)
    return ops.encode(codec, grad, None if residual is None else tf.convert_to_tensor(residual), counter)


def inputs(codec, n):
    rng = np.random.default_rng(n)
    grad = rng.standard_normal(n).astype(np.float32)
    return grad, rng.standard_normal(n).astype(np.float32) if codec.has_residual else None


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("n", [0, 1, 333, 5000])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_same_payload_residual_and_decoded_vector(spec, n, in_graph):
    codec = parse(spec)
    grad, residual = inputs(codec, n)
    payload, encoded, left = encode(codec, grad, residual, _kernels.mix_seed(*COUNTER))

    run = tf.function(in_tensorflow) if in_graph else in_tensorflow
    theirs = run(codec, tf.constant(grad), residual)
    assert theirs.payload.numpy().tobytes() == payload.tobytes()
    assert bool(theirs.finite) == encoded.finite
    assert int(theirs.selected) == (-1 if encoded.selected is None else encoded.selected)
    if residual is not None and n > 0:
        assert theirs.residual.numpy().tobytes() == left.tobytes()
        assert float(theirs.residual_sq) ** 0.5 == pytest.approx(encoded.residual_norm)

    two = tf.concat([theirs.payload, theirs.payload], 0)
    total = ops.decode(codec, two, [payload.size, payload.size], 0.5, n)
    out = decode(codec, payload, n, weight=0.5)
    torch_style = torch.from_numpy(out) + torch.from_numpy(decode(codec, payload, n, weight=0.5))
    np.testing.assert_array_equal(total.numpy(), torch_style.numpy())


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_other_dtypes(dtype):
    codec = parse("nuqsgd:bits=4")
    grad = tf.cast(tf.constant(inputs(codec, 1000)[0]), dtype)
    expected, _, _ = encode(codec, tf.cast(grad, tf.float32).numpy(), None, _kernels.mix_seed(*COUNTER))
    assert in_tensorflow(codec, grad, None).payload.numpy().tobytes() == expected.tobytes()


def test_a_shape_and_no_gradient():
    codec = parse("adacomp:bin=50")

    @tf.function
    def traced(grad):
        encoded = ops.encode(codec, grad, tf.zeros([12]), tf.constant(COUNTER, tf.int64))
        assert encoded.payload.shape.as_list() == [None]
        assert encoded.residual.shape == [12]
        assert encoded.finite.shape == []
        return encoded.residual

    x = tf.Variable(tf.ones([3, 4]))
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(traced(x))
    assert tape.gradient(y, x) is None


@pytest.mark.parametrize(
    ("sizes", "text"),
    [([10], "payload of 10 bytes"), ([-1], "-1 bytes"), ([10**6], "are left"), ([0], "follow the last payload")],
)
def test_malformed_payloads_are_refused(sizes, text):
    codec = parse("qsgd:bits=4")
    payload = in_tensorflow(codec, tf.ones([100]), None).payload
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        ops.decode(codec, payload, sizes, 1.0, 100)


def test_wrong_residual_is_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="residual has 3 elements, the gradient 4"):
        ops.encode(parse("adacomp:bin=50"), tf.ones([4]), tf.zeros([3]), tf.constant(COUNTER, tf.int64))
    with pytest.raises(tf.errors.InvalidArgumentError, match="needs a residual"):
        ops.encode(parse("adacomp:bin=50"), tf.ones([4]), None, tf.constant(COUNTER, tf.int64))
