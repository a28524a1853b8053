"""What users of APMSqueeze may get wrong: they are told, on every rank."""

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Vectors, random

from hvd_compress.tensorflow import APMSqueeze, Compression, MismatchError


@pytest.mark.parametrize(("option", "values"), [("freeze_step", (5, 7)), ("freeze_step", ("auto", 7)), ("beta_2", (0.9, 0.99))])
def test_ranks_that_differ_in_an_option(option, values):
    """They would freeze at different steps, and wait for each other."""
    mine = values[min(hvd.rank(), 1)]
    optimizer, vectors = APMSqueeze(0.01, **{"freeze_step": 5, option: mine}), Vectors(w=(40, 40))
    with pytest.raises(MismatchError, match=f"{option}: rank 0 has {values[0]!r}, rank 1 has {values[1]!r}"):
        vectors.gradients(optimizer.compression, tf.constant(random(40, 40)))


@pytest.mark.parametrize("given", ["none", "another's"])
def test_another_compression_than_its_own(given):
    compression = hvd.Compression.none if given == "none" else Compression.onebit()
    optimizer = hvd_keras.DistributedOptimizer(APMSqueeze(0.01, freeze_step=2), compression=compression)
    model = tf.keras.Sequential([tf.keras.layers.Dense(40, input_shape=(40,))])
    model.compile(optimizer=optimizer, loss="mse")
    x = np.ones((8, 40), np.float32)
    with pytest.warns(UserWarning, match=r"the momentum stays uncompressed.*compression=optimizer.compression"):
        model.fit(x, x, batch_size=8, epochs=1, verbose=0)
