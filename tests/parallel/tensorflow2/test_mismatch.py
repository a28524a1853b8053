"""Ranks that do not compress alike, process sets, and hvd.join()."""

import warnings

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from helpers import Compression, Vectors, assert_equal_on_all_ranks, random

import hvd_compress.plan
import hvd_compress.tensorflow.tracer
from hvd_compress.message import MessageWriter
from hvd_compress.tensorflow import MismatchError
from hvd_compress.tensorflow.exchange import Exchange

HEAD = MessageWriter.HEADER_BYTES + MessageWriter.ENTRY_BYTES

pytestmark = pytest.mark.gloo


def by_rank(first, others):
    return first if hvd.rank() == 0 else others


@pytest.mark.parametrize(
    ("first", "others", "text"),
    [
        (
            {"spec": "qsgd:bits=4"},
            {"spec": "qsgd:bits=2"},
            "spec: rank 0 has 'qsgd:bits=4,bucket=512', rank 1 has 'qsgd:bits=2",
        ),
        ({"spec": "adacomp"}, {"spec": "none"}, "spec: rank 0 has 'adacomp:c=2', rank 1 has 'none'"),
        ({"min_numel": 1}, {"min_numel": 10**6}, "spec of 'w': rank 0 has 'adacomp:bin=500,c=2', rank 1 has 'none'"),
        ({"bucket_bytes": 10}, {"bucket_bytes": 20}, "bucket_bytes: rank 0 has 10, rank 1 has 20"),
        ({"overrides": {"v": "bf16"}}, {}, "spec of 'v': rank 0 has 'bf16', rank 1 has 'adacomp:bin=500,c=2'"),
    ],
    ids=["bits", "codec", "min_numel", "bucket_bytes", "overrides"],
)
@pytest.mark.parametrize("how", ["eager", "function"])
def test_other_options_on_a_rank_are_named_on_all(first, others, text, how):
    vectors = Vectors(w=(40, 50), v=(40, 50))
    compression = Compression.from_spec(**{"spec": "adacomp", **by_rank(first, others)})
    step = tf.function(vectors.gradients) if how == "function" else vectors.gradients
    with pytest.raises(MismatchError, match=f"the ranks do not compress alike: {text}"):
        step(compression, tf.ones([40, 50]), tf.ones([40, 50]))


def test_another_model_on_a_rank_is_named_on_all():
    shape = by_rank((40, 50), (50, 40))
    with pytest.raises(MismatchError, match=r"shape of 'w': rank 0 has \[40, 50\], rank 1 has \[50, 40\]"):
        Vectors(w=shape).gradients(Compression.adacomp(), tf.ones(shape))


def test_more_variables_on_a_rank_are_named_on_all():
    vectors = Vectors(**by_rank({"w": (40, 50)}, {"w": (40, 50), "v": (40, 50)}))
    with pytest.raises(MismatchError, match=r"parameters: rank 1 has 'v', rank 0 has not"):
        vectors.gradients(Compression.adacomp(), *(tf.ones(v.shape) for v in vectors.variables))


def test_another_version_on_a_rank_is_named_on_all(monkeypatch):
    if hvd.rank() == 1:
        monkeypatch.setattr(hvd_compress.plan, "__version__", "0.0.1")
    with pytest.raises(MismatchError, match=r"hvd_compress version: rank 0 has '.*', rank 1 has '0\.0\.1'"):
        Vectors(w=(40, 50)).gradients(Compression.adacomp(), tf.ones([40, 50]))


def test_other_names_on_a_rank_are_none_of_our_business():
    """Keras counts layers up, so a rank that has made one model more has other names."""
    vectors = Vectors(**by_rank({"w": (40, 50)}, {"w_1": (40, 50)}))
    (got,) = vectors.gradients(Compression.adacomp(), tf.constant(random(40, 50)))
    assert_equal_on_all_ranks([got])


@pytest.mark.parametrize("how", ["eager", "function"])
def test_another_codec_on_one_rank_alone_is_noticed(how):
    vectors, compression = Vectors(w=(40, 50)), Compression.qsgd(bits=4)
    step = tf.function(vectors.gradients) if how == "function" else vectors.gradients
    step(compression, tf.ones([40, 50]))
    if hvd.rank() == 1:
        compression.set_codec("qsgd:bits=8")
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"has another plan than this one. Was set_codec\(\) called"):
        step(compression, tf.ones([40, 50]))


def test_ranks_at_different_steps_are_noticed():
    vectors, compression = Vectors(w=(40, 50)), Compression.adacomp()
    vectors.gradients(compression, tf.ones([40, 50]))
    if hvd.rank() == 1:
        compression.slots[0].state.assign([7.0, 1.0, 0.0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="rank 1 is at step 8, rank 0 at step 2"):
        vectors.gradients(compression, tf.ones([40, 50]))


def test_a_rank_that_is_late_is_waited_for(monkeypatch):
    """The others warn, go on, and train."""
    monkeypatch.setattr(hvd_compress.tensorflow.tracer, "PLAN_SECONDS", 0.2)
    vectors, compression = Vectors(w=(40, 50)), Compression.adacomp()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if hvd.rank() == 1:
            tf.py_function(lambda: __import__("time").sleep(1.0), [], [])
        (got,) = vectors.gradients(compression, tf.constant(random(40, 50)))
    assert_equal_on_all_ranks([got])
    texts = [str(w.message) for w in caught]
    if hvd.rank() != 1:
        assert any("have announced their compression after 0.2 s" in text for text in texts)


@pytest.mark.parametrize("spec", ["adacomp", "qsgd:bits=4", "cat"])
def test_join_is_an_error_and_no_hang(spec):
    vectors, compression = Vectors(w=(40, 50)), Compression.from_spec(spec)
    for step in range(3):
        vectors.gradients(compression, tf.constant(random(40, 50, step=step)))
    if hvd.rank() != 0:
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"All(gather|toall) is not supported with Join"):
            vectors.gradients(compression, tf.constant(random(40, 50)))
    hvd.join()


# --- process sets


@pytest.fixture(params=["alone", "two of three"])
def process_set(request, ranks):
    if request.param == "two of three" and ranks < 3:
        pytest.skip("needs 3 ranks")
    process_set = hvd.add_process_set([0] if request.param == "alone" else [0, ranks - 1])
    yield process_set
    hvd.remove_process_set(process_set)


def test_process_sets(process_set):
    vectors, compression = Vectors(w=(40, 50)), Compression.bf16(process_set=process_set)
    (got,) = vectors.gradients(compression, tf.constant(random(40, 50)), process_set=process_set)
    members = process_set.ranks if process_set.included() else [hvd.rank()]
    expected = sum(random(40, 50, rank=rank).astype(np.float64) for rank in members) / len(members)
    np.testing.assert_allclose(got, expected, atol=0.02 if len(members) > 1 else 0)
    assert (compression.stats.total.bytes_sent > 0) == (len(members) > 1)


def test_another_process_set_than_the_tapes_is_refused(process_set):
    with pytest.raises(ValueError, match=r"tape has process_set \d+, its compression 0: give both the same"):
        Vectors(w=(40, 50)).gradients(Compression.bf16(), tf.ones([40, 50]), process_set=process_set)


@pytest.mark.parametrize("spec", ["onebit", "qsgd:bits=4", "adacomp", "cat:scheme=topk+sign,cost=packets", "randomk"])
def test_a_damaged_payload_is_an_error_on_every_rank(spec, exchange, monkeypatch):
    """In a scatter-gather one rank alone sees it; the others wait for what it makes of it."""
    vectors, compression = Vectors(w=(40, 50)), Compression.from_spec(spec)
    damage = tf.Variable(tf.zeros([], tf.uint8))
    name = {"allgather": "allgather", "scatter-gather": "alltoall"}[exchange]
    send = getattr(Exchange, name)

    def damaged(self, name, message, *lengths):
        if "bucket" not in name:
            return send(self, name, message, *lengths)
        place = (lengths[0][0] if lengths else 0) + HEAD + 5  # of what goes to rank 1
        byte = tf.bitwise.bitwise_xor(message[place], damage)
        return send(self, name, tf.tensor_scatter_nd_update(message, [[place]], [byte]), *lengths)

    monkeypatch.setattr(Exchange, name, damaged)
    step = tf.function(lambda g: vectors.gradients(compression, g))
    step(tf.constant(random(40, 50)))
    if hvd.rank() == 0:
        damage.assign(0x10)
    text = "checksum" if exchange == "allgather" else "rank 1 received was damaged"
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        step(tf.constant(random(40, 50)))
