"""Training with every codec: model.fit, the tape eager and in a tf.function; and that nothing of a gradient is lost."""

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    Compression,
    Vectors,
    assert_equal_on_all_ranks,
    batch,
    convnet,
    gather,
    keras,
    left,
    loss_of,
    mean_of_ranks,
    random,
)
from parallel.common import COMPRESSED, SPECS, WITH_RESIDUAL


class EqualOnAllRanks(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.batches = 0

    def on_train_batch_end(self, batch, logs=None):
        assert_equal_on_all_ranks(self.model.trainable_variables)
        self.batches += 1


def horovods_callbacks():
    callbacks = [
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd_keras.callbacks.MetricAverageCallback(),
        hvd_keras.callbacks.LearningRateWarmupCallback(initial_lr=0.05, warmup_epochs=2, momentum_correction=False),
    ]
    for callback in callbacks:
        callback.backend = keras.backend  # where Keras 3 is installed too, Horovod takes the wrong one
    return callbacks


@pytest.mark.parametrize("spec", SPECS)
def test_fit_with_horovods_callbacks(spec, ranks):
    model = convnet()
    for v in model.trainable_variables:
        v.assign_add(0.01 * hvd.rank() * tf.ones_like(v))  # rank 0's are to be broadcast
    compression = Compression.from_spec(spec)
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.05), compression=compression)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    x, y = batch(0, size=64)
    equal = EqualOnAllRanks()
    history = model.fit(
        x,
        y,
        batch_size=16,
        epochs=8,
        verbose=0,
        callbacks=[*horovods_callbacks(), equal],
    ).history["loss"]
    assert equal.batches == 32
    assert history[-1] < 0.9 * history[0]
    assert compression.stats.steps == 32
    if spec in COMPRESSED and spec != "cat":  # which sends more the longer a message takes by itself
        assert compression.stats.total.ratio > 1.5 * 2 / ranks  # payloads are gathered, dense gradients go round a ring


def trained(compression, how, steps=16):
    """The variables and losses of a convnet that a custom loop has trained."""
    model = convnet()
    optimizer = keras.optimizers.SGD(0.05)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True))
        return loss

    step = tf.function(step) if how == "function" else step
    losses = []
    for i in range(steps):
        losses.append(float(step(*map(tf.constant, batch(i % 2)))))
        assert_equal_on_all_ranks(model.trainable_variables)
    return [v.numpy() for v in model.trainable_variables], losses


@pytest.mark.gloo
@pytest.mark.parametrize("how", ["eager", "function"])
@pytest.mark.parametrize("spec", SPECS)
def test_the_tape(spec, how):
    compression = Compression.from_spec(spec)
    _, losses = trained(compression, how)
    assert sum(losses[-2:]) < sum(losses[:2])
    assert compression.stats.steps == 16


@pytest.mark.parametrize("how", ["eager", "function"])
@pytest.mark.parametrize("spec", ["none", "fp16"])
def test_dense_codecs_are_horovods(spec, how, ranks):
    """Bitwise on two ranks; on more, the order in which Horovod adds depends on what it happens to fuse."""
    expected, _ = trained(getattr(hvd.Compression, spec), how)
    got, _ = trained(Compression.from_spec(spec), how)
    rounding = 0 if ranks == 2 else {"none": 1e-6, "fp16": 2e-3}[spec]
    for a, b in zip(expected, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rounding)


def test_eager_and_traced_loops_are_the_same():
    eager, _ = trained(Compression.nuqsgd(error_feedback=True), "eager")
    traced, _ = trained(Compression.nuqsgd(error_feedback=True), "function")
    for a, b in zip(eager, traced, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["eager", "function"])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
@pytest.mark.parametrize("spec", WITH_RESIDUAL)
def test_what_was_sent_and_the_residuals_are_the_gradients(spec, op, how, ranks):
    vectors = Vectors(a=(40, 50), b=(5,), c=(30, 40))
    compression = Compression.from_spec(spec)
    shapes = [v.shape for v in vectors.variables]

    def step(*gradients):
        return vectors.gradients(compression, *gradients, op=op)

    step = tf.function(step) if how == "function" else step
    factor = ranks if op == hvd.Sum else 1
    for steps in range(1, 6):
        got = step(*(tf.constant(random(*shape, step=steps)) for shape in shapes))
        total = got if steps == 1 else [a + b for a, b in zip(total, got, strict=True)]  # noqa: F821
        remains = left(compression)
        for name, sent in zip("abc", total, strict=True):
            everything = sum(mean_of_ranks(ranks, *sent.shape, step=s) for s in range(1, steps + 1))
            remaining = np.zeros(sent.shape)
            if name != "b":  # which is dense
                remaining = sum(theirs.astype(np.float64) for theirs in gather(remains[name])).reshape(sent.shape) / ranks
            np.testing.assert_allclose(sent / factor + remaining, everything, atol=2e-5)
    assert np.any(remains["a"] != 0)


@pytest.mark.parametrize("spec", ["qsgd:bits=4", "bf16"])
def test_without_residual_every_step_is_a_mean(spec, exchange, ranks):
    """Unbiased: the mean over many steps of the same gradient converges to it; bf16: each step is exact to bfloat16."""
    vectors = Vectors(a=(40, 50))
    compression = Compression.from_spec(spec)
    expected = mean_of_ranks(ranks, 40, 50)
    steps = 200 if spec != "bf16" else 1
    step = tf.function(lambda g: vectors.gradients(compression, g)[0])
    mean = sum(step(tf.constant(random(40, 50))).numpy().astype(np.float64) for _ in range(steps)) / steps
    bound = 2**-8 * np.abs(expected).max() if spec == "bf16" else 0.35
    if exchange == "scatter-gather":  # the mean is rounded again, itself: v / n becomes v / n + v
        bound *= (1 + ranks) ** 0.5
    assert np.abs(mean - expected).max() < bound
    assert compression.stats.steps == steps
