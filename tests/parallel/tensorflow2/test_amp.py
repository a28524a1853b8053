"""Gradients that are not finite, and Keras' LossScaleOptimizer."""

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Compression, Vectors, assert_equal_on_all_ranks, gather, keras, left, mean_of_ranks, random
from parallel.common import WITH_RESIDUAL

LossScaleOptimizer = keras.mixed_precision.LossScaleOptimizer


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("how", ["eager", "function"])
@pytest.mark.parametrize("where", ["a", "b", "c"])
@pytest.mark.parametrize("spec", WITH_RESIDUAL)
def test_one_gradient_that_is_not_finite_undoes_the_step(spec, where, how, value):
    """On one rank, in a compressed one or in a dense one: it shows on every rank, and leaves no trace."""
    vectors = Vectors(a=(40, 50), b=(5,), c=(30, 40))
    compression, twin = Compression.from_spec(spec), Compression.from_spec(spec)
    traced = tf.function(vectors.gradients) if how == "function" else vectors.gradients

    def step(compression, number, bad=False):
        gradients = {name: random(*v.shape, step=number) for name, v in zip("abc", vectors.variables, strict=True)}
        if bad and hvd.rank() == 1:
            gradients[where].flat[-1] = value
        return traced(compression, *map(tf.constant, gradients.values()))

    for number in (1, 2):
        step(compression, number)
        step(twin, number)
    before = left(compression)
    result = dict(zip("abc", step(compression, 3, bad=True), strict=True))
    assert not np.isfinite(result[where]).all()
    assert_equal_on_all_ranks([np.nan_to_num(r) for r in result.values()])
    for name, residual in left(compression).items():
        np.testing.assert_array_equal(residual, before[name])
    if not spec.startswith(("qsgd", "randomk")):  # whose random numbers differ from step to step
        for a, b in zip(step(compression, 4), step(twin, 4), strict=True):
            np.testing.assert_array_equal(a, b)


def model_of(weights):
    model = keras.Sequential([keras.layers.Input((40,)), keras.layers.Dense(50), keras.layers.Dense(30, use_bias=False)])
    model.set_weights(weights)
    return model


WEIGHTS = [np.full((40, 50), 0.02, np.float32), np.zeros(50, np.float32), np.full((50, 30), 0.02, np.float32)]


@pytest.mark.parametrize("spec", WITH_RESIDUAL)
def test_fit_with_a_loss_scale_is_fit_without(spec):
    """Scales are powers of two: bitwise, though the scale grows every second step."""
    results = []
    for scaled in (False, True):
        model, compression = model_of(WEIGHTS), Compression.from_spec(spec)
        optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression)
        if scaled:
            optimizer = LossScaleOptimizer(optimizer, initial_scale=16.0, dynamic_growth_steps=2)
        model.compile(optimizer, "mse")
        model.fit(random(64, 40), random(64, 30, step=1), batch_size=8, epochs=1, verbose=0, shuffle=False)
        assert_equal_on_all_ranks(model.get_weights())
        results.append((model.get_weights(), left(compression)))
        if scaled:
            assert float(optimizer.loss_scale) == 16.0 * 2**4
            scales = {slot.state.numpy()[1] for slot in compression.slots if slot.residual.shape[0] != 0}
            assert 16.0 * 2**3 in scales
    for a, b in zip(results[0][0], results[1][0], strict=True):
        np.testing.assert_array_equal(a, b)
    for name, residual in results[0][1].items():
        np.testing.assert_array_equal(residual * 16.0 * 2**3, list(results[1][1].values())[list(results[0][1]).index(name)])


@pytest.mark.parametrize("how", ["fit", "tape"])
@pytest.mark.parametrize("spec", WITH_RESIDUAL)
def test_an_overflow_on_one_rank_is_skipped_on_all(spec, how):
    """As if the step had not been: the run is that without the step."""
    bad_step = 2
    x = random(48, 40)
    y = random(48, 30, step=1)
    clean_x, clean_y = (np.delete(a, slice(8 * bad_step, 8 * bad_step + 8), axis=0) for a in (x, y))
    if hvd.rank() == 1:
        y[8 * bad_step] = np.inf
    results = []
    for xs, ys in ((x, y), (clean_x, clean_y)):
        model = model_of(WEIGHTS)
        inner = keras.optimizers.SGD(0.1)
        if how == "fit":
            compression = Compression.from_spec(spec)
            optimizer = LossScaleOptimizer(hvd_keras.DistributedOptimizer(inner, compression=compression), initial_scale=64.0)
            model.compile(optimizer, "mse")
            model.fit(xs, ys, batch_size=8, epochs=1, verbose=0, shuffle=False)
        else:
            optimizer = LossScaleOptimizer(inner, initial_scale=64.0)
            compression = Compression.from_spec(spec, grad_scaler=optimizer)
            train = tf.function(lambda x, y, m=model, o=optimizer, c=compression: scaled_step(m, o, c, x, y))
            for i in range(0, len(xs), 8):
                train(tf.constant(xs[i : i + 8]), tf.constant(ys[i : i + 8]))
        assert float(optimizer.loss_scale) == (32.0 if xs is x else 64.0)
        assert_equal_on_all_ranks(model.get_weights())
        results.append(model.get_weights())
        assert len(set(gather(float(optimizer.loss_scale)))) == 1
    if not spec.startswith(("qsgd", "randomk")):  # whose random numbers differ from step to step
        for a, b in zip(*results, strict=True):
            np.testing.assert_array_equal(a, b)


def scaled_step(model, optimizer, compression, x, y):
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(tf.reduce_mean((model(x) - y) ** 2))
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, model.trainable_variables))
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def test_mixed_precision(ranks):
    """The policy wraps the optimizer by itself in `compile`."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.layers.Input((40,)), keras.layers.Dense(50), keras.layers.Dense(3, dtype="float32")])
        compression = Compression.adacomp(bin=50)
        model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression), "mse")
        assert isinstance(model.optimizer, keras.mixed_precision.LossScaleOptimizer)
        losses = model.fit(random(64, 40), random(64, 3, step=1), batch_size=8, epochs=6, verbose=0).history["loss"]
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert losses[-1] < losses[0]
    assert_equal_on_all_ranks(model.get_weights())
    scale = float(model.optimizer.loss_scale)
    assert {slot.state.numpy()[1] for slot in compression.slots if slot.state.numpy()[0]} == {scale}
    assert compression.stats.total.ratio > 5


def test_the_loss_scale_optimizer_of_keras_3(ranks):
    keras_3 = pytest.importorskip("keras", minversion="3", reason="needs the package keras 3")
    w = tf.Variable(tf.zeros([40, 50]))
    parameter = keras_3.Variable(np.zeros((40, 50), np.float32))
    optimizer = keras_3.optimizers.LossScaleOptimizer(keras_3.optimizers.SGD(1.0), initial_scale=8.0, dynamic_growth_steps=2)
    optimizer.build([parameter])
    compression = Compression.adacomp(grad_scaler=optimizer)
    expected = mean_of_ranks(ranks, 40, 50)
    sent = 0
    for _ in range(5):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(w * random(40, 50)))
        (gradient,) = hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, [w])
        sent = sent + gradient.numpy() / float(optimizer.dynamic_scale)
        scale = float(optimizer.dynamic_scale)
        optimizer.apply([gradient], [parameter])
    assert float(optimizer.dynamic_scale) > 8.0
    (remains,) = left(compression).values()
    remains = sum(np.asarray(r, np.float64) for r in gather(remains)) / ranks / scale
    np.testing.assert_allclose(sent + remains.reshape(40, 50), 5 * expected, atol=1e-4)


def test_what_is_no_loss_scale_optimizer_is_refused():
    with pytest.raises(ValueError, match="grad_scaler=3 is not allowed; allowed is a Keras LossScaleOptimizer"):
        Compression.adacomp(grad_scaler=3)
