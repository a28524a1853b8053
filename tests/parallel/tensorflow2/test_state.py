"""Checkpoints: a resumed run is bitwise the run that never stopped."""

import json
import os

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Compression, Vectors, assert_equal_on_all_ranks, batch, convnet, gather, keras, left, loss_of, random


class Run:
    """A model, its optimizer and its compression."""

    def __init__(self, spec, how, seed=0):
        self.model = convnet()
        self.optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        self.compression = Compression.from_spec(spec, seed=seed)
        self.checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer, compression=self.compression)
        self.step = tf.function(self._step) if how == "function" else self._step

    def _step(self, x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(self.model, x, y)
        tape = hvd.DistributedGradientTape(tape, compression=self.compression)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    def train(self, steps):
        for step in steps:
            self.step(*map(tf.constant, batch(step)))
        assert_equal_on_all_ranks(self.model.trainable_variables)
        return self

    @property
    def values(self):
        return [v.numpy().tobytes() for v in self.model.trainable_variables]


@pytest.fixture
def path(tmp_path):
    """Another one on every rank."""
    return os.path.join(gather(str(tmp_path))[0], f"rank{hvd.rank()}", "checkpoint")


@pytest.mark.gloo
@pytest.mark.parametrize("how", ["eager", "function"])
@pytest.mark.parametrize("when", ["before the first step", "after a step"])
@pytest.mark.parametrize(
    "spec", ["adacomp", "qsgd:bits=4", "nuqsgd:bits=2,error_feedback=true", "randomk", "cat:scheme=topk+sign,cost=packets"]
)
def test_a_resumed_run_is_the_run_that_never_stopped(spec, when, how, path):
    whole = Run(spec, how).train(range(6))
    first = Run(spec, how, seed=5).train([])
    first.compression._session.seed = 0
    first.train(range(3))
    saved = first.checkpoint.save(path)
    second = Run(spec, how, seed=7)  # another seed: that of the saved run is taken up
    if when == "after a step":  # the variables are there, with other values
        second.train([9])
    second.checkpoint.restore(saved).assert_existing_objects_matched()
    second.train(range(3, 6))
    assert second.values == whole.values
    for a, b in zip(left(second.compression).values(), left(whole.compression).values(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_residuals_are_each_ranks_own(path):
    run = Run("adacomp", "eager").train(range(3))
    saved = run.checkpoint.save(path)
    other = Run("adacomp", "eager")
    other.checkpoint.restore(saved)
    other.train([3])
    run.train([3])
    for name, residual in zip(left(run.compression), left(other.compression).values(), strict=True):
        np.testing.assert_array_equal(residual, left(run.compression)[name])
        if residual.size:
            assert len({theirs.tobytes() for theirs in gather(residual)}) == hvd.size()


def test_without_the_compression_residuals_start_at_zero(path):
    saved = Run("adacomp", "eager").train(range(3)).checkpoint.save(path)
    run = Run("adacomp", "eager")
    tf.train.Checkpoint(model=run.model, optimizer=run.optimizer).restore(saved).expect_partial()
    run.train([3])
    assert max(slot.state.numpy()[0] for slot in run.compression.slots) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_state_of_another_rank_is_refused(when, path):
    saved = Run("adacomp", "eager").train(range(2)).checkpoint.save(path)
    paths = gather(saved)
    theirs = paths[(hvd.rank() + 1) % hvd.size()]
    run = Run("adacomp", "eager")
    if when == "after":
        run.train([0])
    with pytest.raises(ValueError, match=r"the checkpoint is of another run: its rank is \d, here it is \d\. Restored without"):
        run.checkpoint.restore(theirs)


def test_a_state_of_another_spec_is_refused(path):
    saved = Run("adacomp", "eager").train(range(2)).checkpoint.save(path)
    with pytest.raises(ValueError, match=r"its spec is 'adacomp:c=2', here it is 'bf16'"):
        Run("bf16", "eager").checkpoint.restore(saved)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_state_of_another_model_is_refused(when, path, exchange):
    old, new, grad = Vectors(w=(40, 50)), Vectors(w=(50, 40)), tf.ones([40, 50])
    compression = Compression.adacomp()
    old.gradients(compression, grad)
    saved = tf.train.Checkpoint(compression=compression).save(path)
    compression = Compression.adacomp()
    text = rf"another run: 'w' is \[\[40, 50\], 'adacomp:bin=500,c=2', '{exchange}'\] in it, and \[\[50, 40\]"
    if when == "after":
        new.gradients(compression, tf.transpose(grad))
        with pytest.raises(ValueError, match=text):
            tf.train.Checkpoint(compression=compression).restore(saved)
    else:
        tf.train.Checkpoint(compression=compression).restore(saved)
        with pytest.raises(ValueError, match=text):
            new.gradients(compression, tf.transpose(grad))


def test_a_state_of_another_world_size_is_refused():
    compression = Compression.adacomp()
    identity = json.loads(compression.identity.serialize())
    identity["world_size"] += 1
    with pytest.raises(ValueError, match=r"its world size is \d, here it is \d"):
        compression.identity.deserialize(json.dumps(identity))


@pytest.mark.parametrize("suffix", ["", ".keras", ".h5"])
def test_one_rank_alone_saves_its_model(suffix, tmp_path):
    """The compression hangs on the optimizer, and is no part of what is exported."""
    model = keras.Sequential([keras.layers.Input((40,)), keras.layers.Dense(40)])
    compression = Compression.adacomp()
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression), "mse")
    model.fit(random(8, 40), random(8, 40), verbose=0)
    path = str(tmp_path / "model") + suffix
    if hvd.rank() == 0:
        model.save(path)
        loaded = keras.models.load_model(path, compile=False)
        np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])
    model.fit(random(8, 40), random(8, 40), verbose=0)
    assert_equal_on_all_ranks(model.get_weights())
    assert len(compression.slots) == 2
