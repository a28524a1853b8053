"""TensorFlow's ops: the same bytes as everywhere, and what a session keeps of a step."""

import numpy as np
import pytest
from unit.helpers import decode, encode

from hvd_compress import _kernels
from hvd_compress.codecs import parse
from hvd_compress.message import Flags, MessageWriter, read_messages

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")
from hvd_compress.tensorflow import ops  # noqa: E402

SPECS = [
    "none",
    "fp16",
    "bf16",
    "adacomp:bin=50",
    "adacomp:bin=500,c=1.5",
    "onebit:scale=l1",
    "onebit:scale=l2",
    *(
        f"{name}:bits={bits},bucket=100{rest}"
        for name in ("qsgd", "qsgdinf", "nuqsgd")
        for bits in (2, 4, 8)
        for rest in ("", ",coding=elias", ",error_feedback=true")
    ),
]
SEED, RANK, DIGEST = 7, 2, 2**64 - 5
AVERAGE, SUM = [1.0, 0.25, 0, 0], [2.0, 0.5, 0, 0]
"""Of two ranks."""


def variables():
    residual = tf.Variable(tf.zeros([0]), shape=[None], trainable=False)
    piece_residual = tf.Variable(tf.zeros([0]), shape=[None], trainable=False)
    return residual, piece_residual, tf.Variable(tf.constant([0.0, 1.0, 0.0], tf.float64), trainable=False)


class Bench:
    """A session with one group: gathered members, each of a spec, in one bucket, then dense ones."""

    def __init__(self, *specs, dense=0):
        self.number = _kernels.make_session(SEED)
        self.session = _kernels.session(self.number)
        self.codecs = [parse(spec) for spec in specs]
        self.members = list(range(len(specs)))
        segments = [self.session.add_segment(codec.kernel, codec.has_residual) for codec in self.codecs]
        segments += [self.session.add_segment(parse("none").kernel, False) for _ in range(dense)]
        self.common = {"session": self.number, "group": self.session.add_group(segments, DIGEST)}
        self.variables = [variables() for _ in specs]
        self.warnings = []
        self.session.on_warning(self.warnings.append)

    def encode(self, grad, member=0, scale=1.0, variable=()):
        return self.encode_op(grad, member, scale, variable)[0]

    def encode_op(self, grad, member=0, scale=1.0, variable=(), world=(RANK, 2), dense=False, momentum=(), weights=()):
        residual, piece_residual, state = self.variables[member]
        return ops.library().hvd_compress_encode(
            grad=grad,
            residual=residual.handle,
            piece_residual=piece_residual.handle,
            state=state.handle,
            world=list(world),
            scale=scale,
            dense=dense,
            weights=tf.constant(weights, tf.float32, [len(weights)]),
            momentum=list(momentum),
            variable=[v.handle for v in variable],
            member=member,
            bucket=0,
            scattered=False,
            **self.common,
        )

    def pack(self, messages):
        return ops.library().hvd_compress_pack(
            residual=self.variables[0][0].handle, messages=messages, bucket=0, scattered=False, **self.common
        )

    def unpack(self, gathered):
        return ops.library().hvd_compress_unpack(
            residual=self.variables[0][0].handle,
            gathered=gathered,
            bucket=0,
            members=self.members,
            scattered=False,
            **self.common,
        )

    def decode(self, gathered, places, grad, member=0, stand_in=AVERAGE, dense=False):
        return ops.library().hvd_compress_decode(
            state=self.state(member),
            gathered=gathered,
            places=places,
            stand_in=stand_in,
            grad=grad,
            dense=dense,
            member=member,
            row=member,
            scattered=False,
            **self.common,
        )

    def finish(self, message, grad):
        """What comes after `encode`: two ranks have sent the same."""
        gathered = tf.concat([message, message], 0)
        return self.decode(gathered, self.unpack(gathered), grad)

    def dense(self, op, grad, member, **attributes):
        return getattr(ops.library(), f"hvd_compress_{op}")(
            state=self.state(), grad=grad, member=member, **attributes, **self.common
        )

    def step(self, grads, theirs=None, scale=1.0):
        """A whole step of two ranks that send the same (or where given, that message)."""
        message = self.pack([self.encode(grad, member, scale) for member, grad in enumerate(grads)])
        gathered = tf.concat([message, message if theirs is None else theirs], 0)
        places = self.unpack(gathered)
        return [self.decode(gathered, places, grad, member) for member, grad in enumerate(grads)]

    def state(self, member=0):
        return self.variables[member][2].handle

    def residual(self, member=0):
        return self.variables[member][0].numpy()


def payload_of(message, member=0):
    array = message.numpy()
    at, size = read_messages(array, 1)[0].payloads[member]
    return array[at : at + size]


def mixed(step, segment=0):
    return _kernels.mix_seed(SEED, RANK, step, segment)


def gradient(n, seed=None):
    return np.random.default_rng(n if seed is None else seed).standard_normal(n).astype(np.float32)


# --- one kernel for both frameworks


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("n", [0, 1, 333, 5000])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_same_payload_residual_and_decoded_vector(spec, n, in_graph):
    codec, bench = parse(spec), Bench(spec)
    encode_op = tf.function(bench.encode) if in_graph else bench.encode
    residual = None
    for step in (1, 2):
        grad = gradient(n, seed=step)
        payload, encoded, residual = encode(codec, grad, residual, mixed(step))
        message = encode_op(tf.constant(grad))
        assert payload_of(message).tobytes() == payload.tobytes()
        assert read_messages(message.numpy(), 1)[0][:3] == (Flags(0), DIGEST, step)
        if residual is not None:
            assert bench.residual().tobytes() == residual.tobytes()
        else:
            assert bench.residual().size == 0

        gathered = tf.concat([message, message], 0)
        total = bench.decode(gathered, bench.unpack(gathered), tf.constant(grad))
        out = decode(codec, payload, n, weight=0.5)
        np.testing.assert_array_equal(total.numpy(), out + out)

        if n > 0:
            steps, last, _, _ = bench.session.stats()
            assert steps == step
            assert last[0].selected == (-1 if encoded.selected is None else encoded.selected)
            assert last[0].residual_sq ** 0.5 == pytest.approx(encoded.residual_norm)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_other_dtypes(dtype):
    codec, bench = parse("nuqsgd:bits=4"), Bench("nuqsgd:bits=4")
    grad = tf.cast(tf.constant(gradient(1000)), dtype)
    expected, _, _ = encode(codec, tf.cast(grad, tf.float32).numpy(), None, mixed(1))
    message = bench.encode(grad)
    assert payload_of(message).tobytes() == expected.tobytes()
    gathered = tf.concat([message, message], 0)
    result = bench.decode(gathered, bench.unpack(gathered), grad)
    assert result.dtype == dtype
    assert result.shape == [1000]
    mean = tf.constant(decode(codec, expected, 1000))
    np.testing.assert_array_equal(tf.cast(result, tf.float32), tf.cast(tf.cast(mean, dtype), tf.float32))


def test_a_sum():
    bench, grad = Bench("none"), tf.constant(gradient(10))
    message = bench.encode(grad)
    gathered = tf.concat([message, message], 0)
    np.testing.assert_array_equal(bench.decode(gathered, bench.unpack(gathered), grad, stand_in=SUM), grad + grad)


def test_the_stand_in():
    for rank in range(3):
        _, stand_in = Bench("none").encode_op(tf.ones([4]), world=(rank, 3))
        np.testing.assert_array_equal(stand_in, np.float32([1, rank / 3, (DIGEST & 255) / 256, (DIGEST >> 8 & 255) / 256]))


# --- momentum, and steps in which Horovod's own allreduce carries the gradient


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16, tf.float64])
@pytest.mark.parametrize("spec", ["adacomp:bin=50", "onebit:scale=l2", "qsgd:bits=4", "none"])
def test_a_gradient_is_averaged_with_its_momentum(spec, dtype):
    bench, n = Bench(spec), 300
    grad, momentum = tf.cast(gradient(n), dtype), gradient(n, 9)
    for step in (1, 2):
        residual = bench.residual().copy()
        mean = tf.cast(grad, tf.float32).numpy() * np.float32(0.25) + momentum * np.float32(0.75)
        expected, _, left = encode(bench.codecs[0], mean, residual if residual.size else None, mixed(step))
        message, _ = bench.encode_op(grad, momentum=[tf.constant(momentum)], weights=[0.25, 0.75])
        assert payload_of(message).tobytes() == expected.tobytes()
        if left is not None:
            assert bench.residual().tobytes() == left.tobytes()
        bench.finish(message, grad)


def test_what_a_codec_before_has_left_is_sent_with_the_momentum():
    bench = Bench("onebit:scale=l2")
    grad, momentum = tf.constant(gradient(30)), tf.constant(gradient(30, 9))
    bench.finish(bench.encode(grad), grad)
    left = bench.residual().copy()
    bench.session.set_codec(0, parse("none").kernel, False)
    message, _ = bench.encode_op(grad, momentum=[momentum], weights=[0.25, 0.75])
    sent = decode(parse("none"), payload_of(message), 30)
    np.testing.assert_allclose(sent, 0.25 * grad + 0.75 * momentum + left, rtol=1e-6, atol=1e-6)
    assert bench.residual().size == 0


def test_a_momentum_that_does_not_fit_is_refused():
    bench = Bench("onebit:scale=l2")
    with pytest.raises(tf.errors.InvalidArgumentError, match="a momentum of 3 elements for a gradient of 4"):
        bench.encode_op(tf.ones([4]), momentum=[tf.ones([3])], weights=[0.1, 0.9])
    with pytest.raises(tf.errors.InvalidArgumentError, match="weights has 0 elements, not 2"):
        bench.encode_op(tf.ones([4]), momentum=[tf.ones([4])])


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16, tf.float64])
def test_a_dense_step(dtype):
    """The gradient is the stand-in; nothing is encoded, and nothing left."""
    bench, grad = Bench("onebit:scale=l2"), tf.cast(tf.reshape(gradient(12), [3, 4]), dtype)
    message, stand_in = bench.encode_op(grad, dense=True)
    np.testing.assert_array_equal(stand_in, tf.cast(tf.reshape(grad, [-1]), tf.float32))
    assert payload_of(message).size == 0
    assert bench.residual().size == 0
    gathered = tf.concat([message, message], 0)
    result = bench.decode(gathered, bench.unpack(gathered), grad, stand_in=2 * stand_in, dense=True)
    np.testing.assert_array_equal(tf.cast(result, tf.float32), 2 * tf.cast(grad, tf.float32))
    steps, (last,), _, of_last = bench.session.stats()
    assert (steps, of_last) == (1, [0])
    assert last.reduced_bytes == 12 * 4
    with pytest.raises(tf.errors.InvalidArgumentError, match="a dense result of 4 elements for a gradient of 12"):
        bench.decode(gathered, bench.unpack(gathered), grad, dense=True)


def test_a_dense_gradient_that_is_not_finite_undoes_what_others_have_encoded():
    bench = Bench("onebit:scale=l2", "onebit:scale=l2")
    grad, bad = tf.constant(gradient(30)), tf.constant([1.0, np.inf])
    before = None
    for other in (tf.ones([2]), bad):
        first, _ = bench.encode_op(grad)
        second, stand_in = bench.encode_op(other, 1, dense=True)
        message = bench.pack([first, second])
        gathered = tf.concat([message, message], 0)
        places = bench.unpack(gathered)
        bench.decode(gathered, places, grad)
        result = bench.decode(gathered, places, other, 1, stand_in, dense=True)
        assert bool(tf.reduce_all(tf.math.is_finite(result))) == (other is not bad)
        if before is not None:
            np.testing.assert_array_equal(bench.residual(), before)
        before = bench.residual()


def test_several_members_travel_in_one_message():
    bench = Bench("adacomp:bin=50", "qsgd:bits=4", "none")
    grads = [tf.constant(gradient(n)) for n in (300, 40, 7)]
    message = bench.pack([bench.encode(grad, member) for member, grad in enumerate(grads)])
    read = read_messages(message.numpy(), 1)[0]
    assert list(read.payloads) == [0, 1, 2]
    assert read[:3] == (Flags(0), DIGEST, 1)
    for member, (codec, grad) in enumerate(zip(bench.codecs, grads, strict=True)):
        expected, _, _ = encode(codec, grad.numpy(), None, mixed(1, member))
        assert payload_of(message, member).tobytes() == expected.tobytes()


def test_shapes_and_no_gradient():
    bench = Bench("adacomp:bin=50")

    @tf.function
    def traced(grad):
        message = bench.encode(grad)
        assert message.shape.as_list() == [None]
        places = bench.unpack(message)
        assert places.shape.as_list() == [None, None, 4]
        result = bench.decode(message, places, grad, stand_in=[1.0, 0.0, 0, 0])
        assert result.shape == [3, 4]
        return result

    x = tf.Variable(tf.ones([3, 4]))
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(traced(x))
    assert tape.gradient(y, x) is None


# --- damaged and foreign messages


def test_a_damaged_payload_is_refused():
    bench, grad = Bench("qsgd:bits=4"), tf.constant(gradient(100))
    array = bench.encode(grad).numpy()
    array[60] ^= 1
    with pytest.raises(tf.errors.InvalidArgumentError, match="checksum"):
        bench.decode(array, bench.unpack(array), grad, stand_in=[1.0, 0.0, 0, 0])


def message(members, digest=DIGEST, step=1, flags=0):
    writer = MessageWriter(0, len(members))
    for member in members:
        writer.add(member, 0)
    writer.flags = Flags(flags)
    return writer.buffer[: writer.finish(digest, step)].copy()


@pytest.mark.parametrize(
    ("gathered", "text"),
    [
        (message([0])[:-3], "rank 0's message has a header that is none"),
        (np.concatenate([message([0]), message([0], digest=3)]), r"rank 1 has another plan than this one. Was set_codec\(\)"),
        (np.concatenate([message([0]), message([0], step=3)]), "rank 1 is at step 3, rank 0 at step 1"),
        (np.concatenate([message([0]), message([1])]), "rank 1's message has other segments"),
        (np.concatenate([message([0]), message([0, 1])]), "rank 1's message has other segments"),
    ],
)
def test_foreign_messages_are_refused(gathered, text):
    bench = Bench("none")
    bench.encode(tf.ones([3]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        bench.unpack(gathered)


@pytest.mark.parametrize("stand_in", [[1.0, 0.0], [1.0, 0.5], [2.0, 0.25], [0.0, 0.0], [np.nan, 0.25]])
def test_another_op_is_refused(stand_in):
    bench, grad = Bench("none"), tf.ones([3])
    message = bench.encode(grad)
    gathered = tf.concat([message, message], 0)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"op=hvd\.Average and op=hvd\.Sum"):
        bench.decode(gathered, bench.unpack(gathered), grad, stand_in=[*stand_in, 0, 0])


def test_a_residual_of_another_size_is_refused():
    bench = Bench("adacomp:bin=50")
    bench.variables[0][0].assign(tf.zeros([3]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="the residual has 3 elements, the gradient 4"):
        bench.encode(tf.ones([4]))


def test_a_graph_of_another_process_is_refused():
    bench = Bench("none")
    bench.common["session"] = 10**6
    with pytest.raises(tf.errors.FailedPreconditionError, match="of another process: trace it again"):
        bench.encode(tf.ones([4]))


def test_a_failed_session_says_why():
    bench = Bench("none")
    bench.session.fail("the ranks do not compress alike: spec")
    with pytest.raises(tf.errors.InvalidArgumentError, match="the ranks do not compress alike: spec"):
        bench.encode(tf.ones([4]))


# --- the residual and its undoing


NONFINITE = np.array([np.nan] * 300, np.float32)


def test_a_step_is_undone_where_a_gradient_is_not_finite():
    bench = Bench("adacomp:bin=50", "qsgd:bits=8,error_feedback=true")
    grads = [tf.constant(gradient(300)), tf.constant(gradient(40))]
    bench.step(grads)
    before = [bench.residual(0), bench.residual(1)]
    assert all(np.any(residual != 0) for residual in before)
    results = bench.step([tf.constant(NONFINITE), grads[1]])
    assert not np.isfinite(results[0]).any()
    assert np.isfinite(results[1]).all()
    for member in (0, 1):
        np.testing.assert_array_equal(bench.residual(member), before[member])
    _, last, _, _ = bench.session.stats()
    assert [c.residual_sq for c in last] == pytest.approx([float(np.sum(r.astype(float) ** 2)) for r in before])


def test_a_step_is_undone_where_another_rank_says_so():
    bench = Bench("adacomp:bin=50")
    grad = tf.constant(gradient(300))
    bench.step([grad])
    before = bench.residual()
    writer = MessageWriter(1000, 1)
    payload, _, _ = encode(bench.codecs[0], NONFINITE)
    head = writer.HEADER_BYTES + writer.ENTRY_BYTES
    writer.buffer[head : head + payload.size] = payload
    writer.add(0, payload.size)
    writer.flags = Flags.NONFINITE
    bench.step([grad], theirs=writer.buffer[: writer.finish(DIGEST, 2)])
    np.testing.assert_array_equal(bench.residual(), before)


def test_a_dense_result_that_is_not_finite_undoes_what_was_finished_before():
    bench = Bench("adacomp:bin=50", dense=1)
    grad, bias = tf.constant(gradient(300)), tf.ones([3])
    bench.dense("arrive", bias, 1, reduced_size=4)
    bench.step([grad])
    bench.dense("finish", bias, 1, check=True)
    before = bench.residual()
    bench.dense("arrive", bias, 1, reduced_size=4)
    bench.step([grad])
    assert np.any(bench.residual() != before)
    bench.dense("finish", bias * np.inf, 1, check=True)
    np.testing.assert_array_equal(bench.residual(), before)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64])
def test_every_kind_of_not_finite_is_seen(value, dtype):
    for n, at in ((1, 0), (1000, 999)):
        bench = Bench("adacomp:bin=50", dense=1)
        bias = np.full(n, 1.0)
        bench.dense("arrive", tf.cast(bias, dtype), 1, reduced_size=4)
        bench.step([tf.constant(gradient(300))])
        bias[at] = value
        bench.dense("finish", tf.cast(bias, dtype), 1, check=True)
        np.testing.assert_array_equal(bench.residual(), np.zeros(300))


def test_large_finite_values_are_finite():
    bench = Bench("adacomp:bin=50", dense=1)
    bias = tf.fill([1000], np.finfo(np.float32).max)
    bench.dense("arrive", bias, 1, reduced_size=4)
    bench.step([tf.constant(gradient(300))])
    bench.dense("finish", bias, 1, check=True)
    assert np.any(bench.residual() != 0)


def test_a_gradient_whose_result_nobody_asked_for_is_not_lost():
    bench = Bench("adacomp:bin=50", "adacomp:bin=50")
    grads = [tf.constant(gradient(300)), tf.constant(gradient(200))]
    bench.step(grads)
    before = [bench.residual(0), bench.residual(1)]
    message = bench.pack([bench.encode(grad, member) for member, grad in enumerate(grads)])
    gathered = tf.concat([message, message], 0)
    bench.decode(gathered, bench.unpack(gathered), grads[0])  # the other one is pruned
    used = bench.residual(0)
    assert np.any(used != before[0])
    payload, _, left = encode(bench.codecs[1], grads[1].numpy(), before[1], mixed(3, 1))
    assert payload_of(bench.encode(grads[1], 1), 1).tobytes() == payload.tobytes()
    np.testing.assert_array_equal(bench.residual(0), used)
    np.testing.assert_array_equal(bench.residual(1), left)


def test_the_residual_follows_the_loss_scale():
    scaled, plain = Bench("adacomp:bin=50"), Bench("adacomp:bin=50")
    for step, scale in enumerate((4.0, 4.0, 8.0, 2.0)):
        grad = tf.constant(gradient(300, seed=step))
        (result,) = scaled.step([grad * scale], scale=scale)
        (expected,) = plain.step([grad])
        np.testing.assert_array_equal(result, expected * scale)
        np.testing.assert_array_equal(scaled.residual(), plain.residual() * scale)


def test_what_somebody_holds_is_not_overwritten():
    bench = Bench("adacomp:bin=50")
    held = []
    for step in range(4):
        bench.step([tf.constant(gradient(300, seed=step))], scale=2.0**step)
        residual = bench.variables[0][0].read_value()
        held.append((residual, residual.numpy().copy()))
    for residual, copy in held:
        np.testing.assert_array_equal(residual.numpy(), copy)


def test_another_codec_sends_what_the_one_before_left():
    bench = Bench("adacomp:bin=50")
    grads = [tf.constant(gradient(300, seed=step)) for step in range(3)]
    (first,) = bench.step([grads[0]])
    bench.session.set_codec(0, parse("none").kernel, False)
    (second,) = bench.step([grads[1]])
    assert bench.residual().size == 0
    np.testing.assert_allclose(first + second, grads[0] + grads[1], atol=1e-6)
    np.testing.assert_array_equal(bench.step([grads[2]])[0], grads[2])
    bench.session.set_codec(0, parse("adacomp:bin=50").kernel, True)
    bench.step([grads[0]])
    assert bench.residual().size == 300


def test_two_variables_that_share_a_residual_are_noticed():
    bench, grad = Bench("none"), tf.ones([4])
    first, second = tf.Variable(grad), tf.Variable(grad)
    bench.encode(grad, variable=[first])
    bench.encode(grad, variable=[first])
    assert bench.warnings == []
    bench.encode(grad, variable=[second])
    bench.encode(grad, variable=[first])
    assert len(bench.warnings) == 1
    assert "one compression is used for two models" in bench.warnings[0]
