"""APMSqueeze: against the oracle, step by step, and every trap."""

import helpers
import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Vectors, assert_equal_on_all_ranks, batch, convnet, gather, keras, loss_of, random
from reference.apmsqueeze import Ranks

from hvd_compress import apmsqueeze
from hvd_compress.tensorflow import APMSqueeze

LR, BETA_1, BETA_2, EPSILON = 0.01, 0.9, 0.99, 1e-8
BOUND = 2.345208
"""(1 - beta_1) / sqrt((1 - beta_2) (1 - beta_1^2 / beta_2))"""
SHAPES = {"one": (1,), "none": (0,), "three": (3,), "odd": (7, 11), "large": (40, 50)}


def squeezed(overrides={"*": "onebit:scale=l2"}, compression_options=None, **options):  # noqa: B006
    """An APMSqueeze of which everything is compressed."""
    compression_options = {"exchange": helpers.EXCHANGE, "overrides": overrides, **(compression_options or {})}
    options = {"learning_rate": LR, "beta_2": BETA_2, "freeze_step": 3, **options}
    return APMSqueeze(compression_options=compression_options, **options)


def gradient(*shape, step, rank=None):
    """Random numbers that add up exactly: on more than two ranks, the order in which Horovod adds is not always the same."""
    return np.round(random(*shape, step=step, rank=rank) * 64) / 64


class Training:
    """Of variables whose gradients are a rank's own, with a tape or with Horovod's optimizer, eager or in a tf.function.

    Attributes:
        optimizer: Which makes the steps.
        compression: Which it has.
    """

    def __init__(self, how="tape", shapes=SHAPES, function=True, optimizer_options=None, **options):
        self.vectors = Vectors(**shapes)
        for i, v in enumerate(self.vectors.variables):
            v.assign(random(*v.shape, step=100 + i, rank=0))
        self.optimizer = squeezed(**options)
        self.compression = self.optimizer.compression
        if how == "optimizer":
            self.optimizer = hvd_keras.DistributedOptimizer(
                self.optimizer, compression=self.compression, **(optimizer_options or {})
            )
        self.how = how
        self._traced = tf.function(self._step) if function else self._step

    @property
    def variables(self):
        return {v.name.split(":")[0]: v for v in self.vectors.variables}

    def _step(self, grads):
        variables = self.vectors.variables
        if self.how == "tape":
            grads = self.vectors.gradients(self.compression, *grads)
            self.optimizer.apply_gradients(zip(grads, variables, strict=True))
        else:
            self.optimizer.minimize(
                lambda: tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables, grads, strict=True)]), variables
            )

    def step(self, number, change=lambda grads: None):
        grads = {name: gradient(*v.shape, step=number) for name, v in self.variables.items()}
        change(grads)
        self._traced([tf.constant(g) for g in grads.values()])
        assert_equal_on_all_ranks(self.vectors.variables)

    def m(self, name):
        return self.optimizer.momentum_of(self.variables[name]).numpy()


@pytest.mark.gloo
@pytest.mark.parametrize("how", ["tape", "optimizer"])
@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("scale", ["l2", "l1"])
def test_step_by_step_it_is_the_oracles(scale, function, how, ranks, exchange):
    training = Training(how, function=function, codec=scale, overrides={"*": f"onebit:scale={scale}"}, weight_decay=0.1)
    first = {name: v.numpy().flatten() for name, v in training.variables.items()}
    seen, momenta = [], []
    for step in range(12):
        training.step(step)
        seen.append({name: v.numpy().flatten() for name, v in training.variables.items()})
        momenta.append({name: training.m(name).flatten() for name in SHAPES})
    slots = {slot.label: slot for slot in training.compression.slots}
    residuals = gather({name: slot.residual.numpy() for name, slot in slots.items()})
    pieces = gather({name: (int(slot.state.numpy()[2]), slot.piece_residual.numpy()) for name, slot in slots.items()})
    assert any(piece.size for of_rank in pieces for _, piece in of_rank.values()) == (exchange == "scatter-gather")
    for name, shape in SHAPES.items():
        owners = [p[name] for p in pieces if p[name][1].size]
        places = [(begin, begin + piece.size) for begin, piece in owners]
        if exchange == "scatter-gather":  # they make up the whole of it
            assert sum(end - begin for begin, end in places) == np.prod(shape)
        oracle = Ranks(
            first[name],
            ranks,
            places if exchange == "scatter-gather" else None,
            lr=LR,
            beta1=BETA_1,
            beta2=BETA_2,
            eps=EPSILON,
            weight_decay=0.1,
            freeze_step=3,
            scale=scale,
        )
        for step in range(12):
            oracle.step([gradient(*shape, step=step, rank=rank).flatten() for rank in range(ranks)])
            np.testing.assert_allclose(momenta[step][name], oracle.m, atol=2e-6, err_msg=f"m of {name}, step {step}")
            np.testing.assert_allclose(seen[step][name], oracle.x, atol=2e-5, err_msg=f"{name}, step {step}")
        if name != "none":
            for rank in range(ranks):
                np.testing.assert_allclose(residuals[rank][name], oracle.worker[rank], atol=1e-5)
        for begin, piece in owners:
            np.testing.assert_allclose(piece, oracle.server[begin : begin + piece.size], atol=1e-5)


def test_both_stages_are_one_trace():
    training = Training(freeze_step=2)
    for step in range(4):
        training.step(step)
    assert bool(training.optimizer.is_frozen)
    assert training._traced.experimental_get_tracing_count() == 1


# --- traps


def test_the_second_moment_is_bitwise_constant_after_the_switch():
    training, before = Training("optimizer"), None
    for step in range(8):
        training.step(step)
        now = [v.numpy() for v in training.optimizer._second_moments]
        if before is not None:
            same = all(np.array_equal(a, b) for a, b in zip(before, now, strict=True))
            assert same == (step >= 3)
        before = now


def test_what_had_no_gradient_does_not_move():
    def change(grads):
        grads["large"].flat[rows] = 0

    rows = [5, 6, 1000]
    training = Training()
    large = training.variables["large"]
    untouched = large.numpy().flat[rows]
    for step in range(9):
        training.step(step, change if step < 3 else lambda grads: None)
    np.testing.assert_array_equal(large.numpy().flat[rows], untouched)
    assert np.abs(large.numpy()).max() < 10


def test_what_had_a_small_gradient_moves_no_further_than_adam_can():
    training = Training(shapes={"large": (40, 50)})
    large = training.variables["large"]
    for step in range(10):
        before = large.numpy()
        training.step(step, lambda grads, step=step: grads["large"][3].__imul__(1e-6 if step < 3 else 1))
        assert np.abs(large.numpy() - before).max() <= LR * BOUND * (1 + 1e-4)
    assert np.abs(large.numpy()[3] - before[3]).max() > 0


def test_weight_decay_goes_on_after_the_switch():
    training = Training(weight_decay=0.5, learning_rate=0.1)
    large = training.variables["large"]
    for step in range(5):
        training.step(step, lambda grads: grads["large"].fill(0))  # V is 0: nothing else acts
        if step == 2:
            before = large.numpy()
    np.testing.assert_allclose(large.numpy(), before * (1 - 0.1 * 0.5) ** 2, rtol=1e-6)


def test_every_step_counts():
    """The first one, and that after the switch, move the variables."""
    training = Training(freeze_step=1)
    large = training.variables["large"]
    for step in range(3):
        before = large.numpy()
        training.step(step)
        assert (large.numpy() != before).mean() > 0.99


def test_all_switch_at_once_and_stats_say_so(exchange):
    training = Training(freeze_step=0.5, total_steps=6)
    ways = []
    for step in range(6):
        training.step(step)
        ways.append(training.compression.stats.step.exchanges)
    assert ways == [{"allreduce"}] * 3 + [{exchange}] * 3
    assert training.compression.stats.step.ratio > 5


@pytest.mark.parametrize("how", ["tape", "optimizer"])
def test_auto_waits_for_the_last_rank(monkeypatch, ranks, how):
    """Ranks whose second moments look different to them switch when it is time for all."""
    training = Training(how, freeze_step="auto", beta_2=0.9)
    monkeypatch.setattr(apmsqueeze, "is_stable", lambda now, before: training.optimizer._steps >= 4 + hvd.rank())
    frozen = []
    for step in range(10):
        training.step(step)
        frozen.append(bool(training.optimizer.is_frozen))
    assert frozen == [step >= 4 + ranks - 1 for step in range(1, 11)]
    assert training.compression.stats.step.exchanges != {"allreduce"}


def test_auto():
    """With gradients of one distribution: when the norm is near its limit."""
    training = Training(shapes={"large": (40, 50)}, freeze_step="auto", beta_2=0.9)
    frozen = []
    for step in range(60):
        training.step(step)
        frozen.append(bool(training.optimizer.is_frozen))
    assert frozen[-1]
    assert 25 < frozen.index(True) < 50


# --- with the rest of Keras and Horovod


def test_a_variable_that_is_not_frozen_stays_adams(ranks):
    training = Training("optimizer", shapes={"large": (40, 50), "embedding": (30, 40)}, no_freeze=["emb*"], overrides=None)
    embedding = training.variables["embedding"]
    oracle = Ranks(embedding.numpy().flatten(), ranks, None, LR, BETA_1, BETA_2, EPSILON, 0, freeze_step=100)
    for step in range(6):
        training.step(step)
        oracle.step([gradient(30, 40, step=step, rank=rank).flatten() for rank in range(ranks)])
        np.testing.assert_allclose(embedding.numpy().flatten(), oracle.x, atol=1e-5)
    stats = training.compression.stats
    assert stats.step.of("embedding").exchanges == {"allreduce"}
    assert stats.step.of("large").exchanges != {"allreduce"}


def test_small_variables_keep_their_exact_momentum(ranks):
    training = Training(shapes={"large": (40, 50), "bias": (50,)}, overrides=None)
    bias = training.variables["bias"]
    x, m, v = bias.numpy().astype(np.float64), np.zeros(50), np.zeros(50)
    for step in range(8):
        training.step(step)
        g = sum(gradient(50, step=step, rank=rank).astype(np.float64) for rank in range(ranks)) / ranks
        m = BETA_1 * m + (1 - BETA_1) * g
        v = BETA_2 * v + (1 - BETA_2) * g**2 if step < 3 else v
        x -= LR * np.clip(m / (np.sqrt(v) + EPSILON), -BOUND, BOUND)
        np.testing.assert_allclose(bias.numpy(), x, atol=1e-5)
    assert training.compression.stats.step.of("bias").exchanges == {"allreduce"}


def test_the_sum_of_gradients_trains_as_their_mean():
    """Adam's step does not depend on the gradients' size, and the compressed stage keeps that."""
    results = []
    for op in (hvd.Average, hvd.Sum):
        training = Training("optimizer", optimizer_options={"op": op}, epsilon=1e-12)
        for step in range(8):
            training.step(step)
        results.append([v.numpy() for v in training.vectors.variables])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_variables_that_come_later_are_taken_too():
    """Two tapes, each of a part of the model, and one optimizer."""
    vectors = Vectors(a=(40, 50), b=(30, 40))
    optimizer = squeezed(freeze_step=2)
    compression = optimizer.compression
    for step in range(5):
        for v in vectors.variables:
            (grad,) = vectors.gradients(compression, gradient(*v.shape, step=step), variables=[v])
            optimizer.apply_gradients([(grad, v)])
        assert_equal_on_all_ranks(vectors.variables)
    assert compression.stats.step.exchanges != {"allreduce"}
    assert int(optimizer._steps) == 10


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float64])
def test_other_dtypes(dtype):
    variable = tf.Variable(tf.zeros([40, 50], dtype))
    optimizer = squeezed(freeze_step=2)
    for step in range(6):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * tf.constant(gradient(40, 50, step=step), dtype))
        tape = hvd.DistributedGradientTape(tape, compression=optimizer.compression)
        optimizer.apply_gradients([(tape.gradient(loss, [variable])[0], variable)])
        assert_equal_on_all_ranks([variable.numpy().astype(np.float64)])
    assert optimizer.momentum_of(variable).dtype == (tf.float64 if dtype == tf.float64 else tf.float32)
    assert np.isfinite(variable.numpy().astype(np.float64)).all()
    assert (variable.numpy() != 0).mean() > 0.9


def test_fit_with_everything():
    """Callbacks, passes, clipping, decay and a schedule; it learns, and the last step is compressed."""
    schedule = keras.optimizers.schedules.CosineDecay(3e-3, 200)
    optimizer = squeezed(None, learning_rate=schedule, freeze_step=8, weight_decay=1e-4, global_clipnorm=5.0, use_ema=True)
    compression = optimizer.compression
    optimizer = hvd_keras.DistributedOptimizer(optimizer, compression=compression, backward_passes_per_step=2)
    model = convnet()
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = batch(0, size=64)
    history = model.fit(
        np.concatenate([x] * 8),
        np.concatenate([y] * 8),
        batch_size=16,
        epochs=4,
        verbose=0,
        callbacks=[hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)],
    )
    assert history.history["loss"][-1] < 0.5 * history.history["loss"][0]
    assert_equal_on_all_ranks(model.get_weights())
    assert int(optimizer._steps) == 4 * 32 // 2
    assert compression.stats.step.exchanges != {"allreduce"}
    assert optimizer.compression is compression


def test_a_broadcast_brings_all_ranks_to_one_state():
    training = Training(freeze_step=2)
    for step in range(3):
        training.step(step)
    optimizer = training.optimizer
    for kept in optimizer._momenta:
        kept.assign_add(tf.ones_like(kept) * hvd.rank())
    optimizer._steps.assign_add(hvd.rank())
    if hvd.rank() != 0:
        optimizer._frozen.assign(0)
    hvd.broadcast_variables([*training.vectors.variables, *optimizer.variables()], root_rank=0)
    assert (int(optimizer._steps), bool(optimizer.is_frozen)) == (3, True)
    for step in range(3, 6):
        training.step(step)


@pytest.mark.parametrize("bad_step", [1, 5], ids=["dense", "compressed"])
@pytest.mark.parametrize("how", ["tape", "fit"])
def test_an_overflow_on_one_rank_is_skipped_on_all(bad_step, how):
    """As if the step had not been, but that the loss scale is another one, exactly half."""
    x, y = random(64, 40), random(64, 30, step=1)
    clean_x, clean_y = (np.delete(a, slice(8 * bad_step, 8 * bad_step + 8), axis=0) for a in (x, y))
    if hvd.rank() == 1:
        y[8 * bad_step] = np.inf
    results = []
    for xs, ys in ((x, y), (clean_x, clean_y)):
        model = keras.Sequential([keras.layers.Input((40,)), keras.layers.Dense(50), keras.layers.Dense(30)])
        model.set_weights([np.full((40, 50), 0.02), np.zeros(50), np.full((50, 30), 0.02), np.zeros(30)])
        inner = squeezed()
        if how == "fit":
            inner = hvd_keras.DistributedOptimizer(inner, compression=inner.compression)
        optimizer = keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=64.0)
        if how == "fit":
            model.compile(optimizer, "mse")
            model.fit(xs, ys, batch_size=8, epochs=1, verbose=0, shuffle=False)
        else:
            train = tf.function(lambda x, y, m=model, o=optimizer: _scaled_step(m, o, x, y))
            for i in range(0, len(xs), 8):
                train(tf.constant(xs[i : i + 8]), tf.constant(ys[i : i + 8]))
        assert_equal_on_all_ranks(model.get_weights())
        assert float(optimizer.loss_scale) == (32.0 if xs is x else 64.0)
        assert int(inner._steps) == 7
        results.append(model.get_weights())
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def _scaled_step(model, optimizer, x, y):
    compression = optimizer.inner_optimizer.compression
    compression.grad_scaler = optimizer
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(tf.reduce_mean((model(x) - y) ** 2))
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, model.trainable_variables))
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


@pytest.mark.parametrize("how", ["tape", "optimizer"])
def test_a_resumed_run_is_the_run_that_never_stopped(how, tmp_path):
    def checkpoint(training):
        return tf.train.Checkpoint(optimizer=training.optimizer, compression=training.compression, **training.variables)

    for saved_at in (2, 6):
        training = Training(how)
        for step in range(saved_at):
            training.step(step)
        path = checkpoint(training).write(str(tmp_path / f"{saved_at}_{hvd.rank()}"))
        for step in range(saved_at, 9):
            training.step(step)
        resumed = Training(how)
        status = checkpoint(resumed).read(path)
        for step in range(saved_at, 9):
            resumed.step(step)
        status.assert_consumed()
        for a, b in zip(training.vectors.variables, resumed.vectors.variables, strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())
        for a, b in zip(training.optimizer.variables(), resumed.optimizer.variables(), strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_residuals_are_not_in_the_checkpoint_of_the_optimizer(tmp_path):
    training = Training()
    for step in range(5):
        training.step(step)
    path = tf.train.Checkpoint(optimizer=training.optimizer).write(str(tmp_path / f"{hvd.rank()}"))
    names = [name for name, _ in tf.train.list_variables(path)]
    assert any("_frozen" in name for name in names)
    assert not any("residual" in name or "_handed" in name for name in names)


def test_a_model_is_saved_and_loaded(tmp_path):
    optimizer = squeezed(None, freeze_step=2)
    optimizer = hvd_keras.DistributedOptimizer(optimizer, compression=optimizer.compression)
    model = convnet()
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = batch(0, size=64)
    model.fit(x, y, batch_size=16, verbose=0)
    path = str(tmp_path / f"{hvd.rank()}.h5")
    model.save(path)
    loaded = hvd_keras.load_model(path, custom_optimizers=[APMSqueeze], compression=squeezed(None).compression)
    assert isinstance(loaded.optimizer, APMSqueeze)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    loaded.fit(x, y, batch_size=16, verbose=0)
    assert bool(loaded.optimizer.is_frozen)
    assert loaded.optimizer.compression.stats.step.exchanges != {"allreduce"}
    assert_equal_on_all_ranks(loaded.get_weights())


@pytest.mark.parametrize(
    "spec", ["adacomp:bin=50", "onebit:scale=l1", "qsgd:bits=8,error_feedback=true", "cat:cost=packets", "topk", "bf16", "none"]
)
def test_any_codec(spec):
    optimizer = squeezed(None, codec=spec, freeze_step=10, learning_rate=3e-3)
    compression = optimizer.compression
    optimizer = hvd_keras.DistributedOptimizer(optimizer, compression=compression)
    model = convnet()
    hvd.broadcast_variables(model.trainable_variables, root_rank=0)
    losses = []

    @tf.function
    def step(x, y):
        loss = None

        def compute():
            nonlocal loss
            loss = loss_of(model, x, y)
            return loss

        optimizer.minimize(compute, model.trainable_variables)
        return loss

    for number in range(40):
        losses.append(float(step(*batch(number % 2))))
    assert_equal_on_all_ranks(model.get_weights())
    assert losses[-1] < 0.6 * losses[0]
    assert str(compression) == str(apmsqueeze.codec_of(spec))


# --- what is refused


def test_its_compression_with_another_optimizer_is_refused():
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=squeezed().compression)
    variable = tf.Variable(tf.zeros([40, 50]))
    with pytest.raises(ValueError, match="this compression is of an APMSqueeze, and Horovod's optimizer is of SGD: hand both"):
        optimizer.minimize(lambda: tf.reduce_sum(variable**2), [variable])


def test_codecs_without_a_residual_are_refused():
    with pytest.raises(ValueError, match=r"qsgd:bits=4,bucket=512 keeps no residual.*; with error_feedback=true it does"):
        _ = APMSqueeze(codec="qsgd:bits=4").compression
    with pytest.raises(ValueError, match="nuqsgd:bits=2,bucket=512 keeps no residual"):
        APMSqueeze().compression.set_codec("nuqsgd:bits=2")


def test_a_pattern_that_names_no_variable_is_refused():
    training = Training(no_freeze=["norm*"])
    with pytest.raises(ValueError, match=r"the pattern 'norm\*' matches no parameter; there are 'one', 'none'"):
        training.step(0)
