"""With one process nothing is compressed, and training is what it would be without us."""

import numpy as np
import pytest

hvd = pytest.importorskip("horovod.tensorflow", reason="needs Horovod built against TensorFlow")
import tensorflow as tf  # noqa: E402
from horovod.tensorflow.compression import Compressor  # noqa: E402

from hvd_compress.tensorflow import Compression  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def _horovod():
    hvd.init()


def trained(compression, how):
    rng = np.random.default_rng(0)
    w = tf.Variable(rng.standard_normal((40, 40)).astype(np.float32))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w) ** 2)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        w.assign_sub(0.1 * tape.gradient(loss, [w])[0])

    step = tf.function(step) if how == "function" else step
    for _ in range(5):
        step(tf.constant(rng.standard_normal((8, 40)).astype(np.float32)))
    return w.numpy()


@pytest.mark.parametrize("elastic", [False, True], ids=["plain", "elastic"])
@pytest.mark.parametrize("how", ["eager", "function"])
@pytest.mark.parametrize("spec", ["adacomp", "qsgd:bits=2", "fp16", "bf16", "none"])
def test_training_is_dense(spec, how, elastic, monkeypatch):
    if elastic:  # the graph is then traced for more processes to come
        monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    expected = trained(hvd.Compression.none, how)
    compression = Compression.from_spec(spec)
    np.testing.assert_array_equal(trained(compression, how), expected)
    assert compression.stats.total.bytes_sent == 0
    if not elastic:
        assert compression.stats.steps == 0
        assert compression.slots == []


def test_all_are_horovods_compressors():
    for name in ("adacomp", "qsgd", "qsgdinf", "nuqsgd", "onebit", "fp16", "bf16", "none"):
        compression = getattr(Compression, name)()
        assert isinstance(compression, Compressor)
        assert hash(compression) == hash(compression)
        assert compression.stats.steps == 0
    assert issubclass(Compression.none, hvd.Compression.none)
    assert issubclass(Compression.fp16, hvd.Compression.fp16)


def test_none_and_fp16_as_they_are_are_horovods_own():
    for name in ("none", "fp16"):
        assert getattr(Compression, name).compress is getattr(hvd.Compression, name).compress


def test_options_reach_the_codec():
    assert str(Compression.adacomp(bin=100, c=1)) == "adacomp:bin=100,c=1"
    assert str(Compression.nuqsgd(bits=3, bucket=64, coding="elias")) == "nuqsgd:bits=3,bucket=64,coding=elias"
    assert str(Compression.from_spec("qsgd:bits=2")) == "qsgd:bits=2,bucket=512"


def test_what_is_no_algorithm():
    with pytest.raises(AttributeError, match=r"no algorithm .adacmp.: there are adacomp, bf16, .*nuqsgd, onebit, qsgd"):
        _ = Compression.adacmp
    with pytest.raises(TypeError, match=r"pass Compression.adacomp\(\), for example"):
        _ = Compression.compress
    with pytest.raises(TypeError, match=r"pass Compression.from_spec\(spec\)"):
        Compression.from_spec.compress(None)
    with pytest.raises(TypeError, match="made without the variables"):
        Compression.adacomp([tf.Variable(0.0)])
    for missing in ("__wrapped__", "_x"):
        assert not hasattr(Compression, missing)


def test_overrides_are_checked_with_one_process_too():
    with pytest.raises(ValueError, match="the pattern 'nope' matches no parameter; there are 'Variable'"):
        trained(Compression.adacomp(overrides={"nope": "none"}), "eager")


def test_what_is_printed():
    compression = Compression.adacomp(bin=50)
    assert repr(compression) == "<hvd_compress.tensorflow compression adacomp:bin=50,c=2>"
    assert repr(compression.stats) == "<Stats of 0 steps: 0 bytes sent, ratio 1.0>"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"name": 7}, "name=7 is not allowed; allowed is a string of at least one character"),
        ({"name": ""}, "name='' is not allowed"),
        ({"overrides": []}, r"overrides=\[\] is not allowed; allowed is a dict of name pattern to spec"),
        ({"grad_scaler": tf.keras.mixed_precision.LossScaleOptimizer}, "grad_scaler=.* is not allowed"),
        ({"exchange": "ring"}, "exchange='ring' is not allowed; allowed is 'auto', 'allgather', 'scatter-gather'"),
        ({"min_numel": -1}, "min_numel=-1 is not allowed; allowed is a whole number from 0 on"),
        ({"bucket_bytes": 0}, "bucket_bytes=0 is not allowed"),
        ({"seed": -1}, r"seed=-1 is not allowed; allowed is a whole number from 0 to 2\^64 - 1"),
        ({"overrides": {"*": "zip"}}, "zip"),
        ({"process_set": 3}, "process_set=3 is not allowed; allowed is a horovod.tensorflow.ProcessSet"),
        ({"grad_scaler": 3}, "grad_scaler=3 is not allowed; allowed is a Keras LossScaleOptimizer"),
        ({"bitts": 3}, "qsgd: unknown option 'bitts': there are bits, bucket, coding, error_feedback, cost, c0, c1"),
    ],
)
def test_options_that_are_not_allowed(options, text):
    with pytest.raises(ValueError, match=text):
        Compression.qsgd(**options)


def test_one_that_was_not_called_says_so():
    with pytest.raises(TypeError, match=r"Compression\.adacomp was not called: pass Compression\.adacomp\(\)"):
        hvd.allreduce(tf.ones([3]), compression=Compression.adacomp)


def test_it_cannot_be_copied():
    import copy
    import pickle

    for how in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            how(Compression.adacomp())


def test_the_same_options_and_defaults_as_pytorchs():
    import inspect

    from hvd_compress.tensorflow import CodecCompressor as ours

    pytest.importorskip("horovod.torch", reason="needs Horovod built against PyTorch")
    from hvd_compress.torch import CodecCompressor as theirs

    mine, other = (dict(inspect.signature(kind).parameters) for kind in (ours, theirs))
    assert list(mine) == [name for name in other if name != "named_parameters"]
    for name, parameter in mine.items():
        if name != "process_set":  # each framework's own object for the global one
            assert parameter.default == other[name].default, name
