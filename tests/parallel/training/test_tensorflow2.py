"""APMSqueeze learns what Adam learns, by `model.fit`."""

import data
import horovod.tensorflow.keras as hvd
import numpy as np
import pytest
import tensorflow as tf
from parallel.common import assert_equal_on_all_ranks

from hvd_compress.tensorflow import APMSqueeze

keras = tf.keras
STEPS = 1000


@pytest.fixture(autouse=True)
def _horovod():
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def make_model(seed):
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPool2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def test_a_cnn(seed):
    losses = {}
    schedule = keras.optimizers.schedules.PolynomialDecay(5e-3, STEPS, 0.0)
    for which in ("adam", "apmsqueeze"):
        model = make_model(seed)
        if which == "adam":
            optimizer, compression = keras.optimizers.Adam(schedule, beta_2=0.98, epsilon=1e-8, clipnorm=1.0), None
            optimizer = hvd.DistributedOptimizer(optimizer)
        else:
            optimizer = APMSqueeze(schedule, beta_2=0.98, freeze_step=0.15, total_steps=STEPS, clipnorm=1.0)
            compression = optimizer.compression
            optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        batches = data.batches([seed, hvd.rank()], STEPS)
        model.fit(batches, steps_per_epoch=STEPS, verbose=0, callbacks=callbacks)
        assert_equal_on_all_ranks([np.asarray(w) for w in model.get_weights()], hvd)
        losses[which] = model.evaluate(*data.all_digits(), batch_size=1000, verbose=0)
    if hvd.rank() == 0:
        print(f"loss with Adam {losses['adam']:.4f}, with APMSqueeze {losses['apmsqueeze']:.4f}: ", end="")
        print(f"{100 * (losses['apmsqueeze'] / losses['adam'] - 1):+.2f} %; {compression.stats}")
    assert losses["adam"] < 1.3
    assert losses["apmsqueeze"] < 1.02 * losses["adam"]
    assert compression.stats.step.ratio > 15
