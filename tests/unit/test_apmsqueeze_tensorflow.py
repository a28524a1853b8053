"""APMSqueeze for Keras: its options, and what it is with one process. What it shares with PyTorch is in test_apmsqueeze.py."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest

hvd_keras = pytest.importorskip("horovod.tensorflow.keras", reason="needs Horovod built against TensorFlow and its Keras")
import tensorflow as tf  # noqa: E402
from reference.apmsqueeze import Ranks  # noqa: E402

from hvd_compress.tensorflow import APMSqueeze  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def _horovod():
    hvd_keras.init()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"learning_rate": -1}, "learning_rate=-1 is not allowed; allowed is a number from 0 on"),
        ({"learning_rate": "x"}, "learning_rate='x' is not allowed"),
        ({"beta_1": 1.0}, "beta_1=1.0 is not allowed; allowed is a number from 0 to below 1"),
        ({"beta_2": -0.1}, "beta_2=-0.1 is not allowed"),
        ({"epsilon": math.inf}, "epsilon=inf is not allowed"),
        ({"weight_decay": math.nan}, "weight_decay=nan is not allowed"),
        ({"freeze_step": 0.2}, "freeze_step=0.2 is a fraction of total_steps, which was not given"),
        ({"no_freeze": "norm*"}, r"no_freeze='norm\*' is not allowed; allowed is a list of name patterns"),
        ({"codec": "l3"}, "l3"),
        ({"betas": (0.9, 0.99)}, "betas"),
    ],
)
def test_options_that_are_not_allowed(options, text):
    with pytest.raises((ValueError, TypeError), match=text):
        APMSqueeze(**options)


def test_the_options_of_its_compression_are_checked():
    with pytest.raises(ValueError, match="APMSqueeze: unknown option 'bitts': of the compression there are min_numel, "):
        _ = APMSqueeze(compression_options={"bitts": 3}).compression
    with pytest.raises(ValueError, match="min_numel=-1 is not allowed"):
        _ = APMSqueeze(compression_options={"min_numel": -1}).compression
    with pytest.raises(ValueError, match="grad_scaler=3 is not allowed; allowed is a Keras LossScaleOptimizer"):
        APMSqueeze().compression.grad_scaler = 3


def test_its_config_makes_another_one():
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    for options in (
        {},
        {"learning_rate": schedule, "beta_1": 0.8, "weight_decay": 0.1, "freeze_step": 0.5, "total_steps": 10},
        {"codec": "l1", "no_freeze": ["a", "b*"], "clipnorm": 1.0, "epsilon": 1e-6, "name": "mine"},
    ):
        optimizer = APMSqueeze(**options)
        again = APMSqueeze.from_config(optimizer.get_config())
        assert again.get_config() == optimizer.get_config()
    assert APMSqueeze(codec="l1").get_config()["codec"] == "onebit:scale=l1"
    assert APMSqueeze(freeze_step=0.5, total_steps=10).get_config()["freeze_step"] == 5


@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("weight_decay", [None, 0.1])
def test_one_process_is_adam_and_then_momentum_over_a_frozen_second_moment(distributed, weight_decay, function):
    rng = np.random.default_rng(0)
    p = tf.Variable(rng.standard_normal(500).astype(np.float32))
    first, gradients = p.numpy(), rng.standard_normal((9, 500)).astype(np.float32)
    gradients[:, 3] = 0
    gradients[:4, 5] = 0  # V is 0 there
    optimizer = APMSqueeze(0.01, beta_2=0.99, weight_decay=weight_decay, freeze_step=4)
    if distributed:
        optimizer = hvd_keras.DistributedOptimizer(optimizer, compression=optimizer.compression)

    def step(g):
        optimizer.minimize(lambda: tf.reduce_sum(p * g), [p])

    step = tf.function(step) if function else step
    oracle = Ranks(first, 1, None, 0.01, 0.9, 0.99, 1e-8, weight_decay or 0, freeze_step=4, scale=None)
    for g in gradients:
        step(tf.constant(g))
        oracle.step([g])
    np.testing.assert_allclose(p.numpy(), oracle.x, atol=2e-6)
    assert bool(optimizer.is_frozen)
    assert optimizer.momentum_of(p).shape == [500]


def test_before_the_freeze_it_is_pytorchs():
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    from hvd_compress.torch import APMSqueeze as Theirs

    ours, theirs = tf.Variable(tf.ones([300])), torch.nn.Parameter(torch.ones(300))
    optimizer, other = APMSqueeze(0.01, freeze_step=10), Theirs([theirs], lr=0.01, freeze_step=10)
    for step in range(20):
        g = np.random.default_rng(step).standard_normal(300).astype(np.float32)
        optimizer.apply_gradients([(tf.constant(g), ours)])
        theirs.grad = torch.from_numpy(g)
        other.step()
        np.testing.assert_allclose(ours.numpy(), theirs.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_sparse_gradients_are_taken():
    """Of an embedding, with one process, as by Keras' Adam: all rows move, since all have a momentum."""
    sparse, dense = (tf.Variable(tf.ones([5, 3])) for _ in range(2))
    optimizers = [APMSqueeze(0.01, freeze_step=2) for _ in range(2)]
    for step in range(5):
        values = np.random.default_rng(step).standard_normal((2, 3)).astype(np.float32)
        slices = tf.IndexedSlices(tf.constant(values), tf.constant([1, 3]), tf.constant([5, 3]))
        optimizers[0].apply_gradients([(slices, sparse)])
        optimizers[1].apply_gradients([(tf.convert_to_tensor(slices), dense)])
        np.testing.assert_array_equal(sparse.numpy(), dense.numpy())
    np.testing.assert_array_equal(sparse.numpy()[[0, 2, 4]], 1)


def test_no_gradients_are_no_step():
    optimizer = APMSqueeze()
    optimizer.apply_gradients([])


def test_keras_3_is_refused_in_a_sentence():
    pytest.importorskip("keras", minversion="3", reason="needs the package keras 3")
    code = "from hvd_compress.tensorflow import Compression; from hvd_compress.tensorflow import APMSqueeze"
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "the one before Keras 3: install tf_keras and set TF_USE_LEGACY_KERAS=1" in done.stderr
