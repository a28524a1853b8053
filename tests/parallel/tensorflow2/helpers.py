"""Models, gradients and optimizers."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from parallel import common

from hvd_compress import tensorflow

keras = tf.keras

EXCHANGE = "auto"
"""That `Compression` takes by default; every test is run with several, see conftest.py."""


class Compression(tensorflow.Compression):
    """The real one, with another default."""

    @classmethod
    def make(cls, codec, *parameters, **options):
        return super().make(codec, *parameters, **{"exchange": EXCHANGE, **options})


def gather(value):
    return common.gather(value, hvd)


def assert_equal_on_all_ranks(tensors):
    common.assert_equal_on_all_ranks([np.asarray(t) for t in tensors], hvd)


def random(*shape, step=0, rank=None):
    generator = np.random.default_rng([step, hvd.rank() if rank is None else rank])
    return generator.standard_normal(shape).astype(np.float32)


def batch(step, rank=None, size=16):
    """Another one on every rank and in every step; the label can be learned."""
    x = random(size, 8, 8, 2, step=step, rank=rank)
    return x, x.reshape(size, -1)[:, :20].argmax(1)


def convnet(dtype=None):
    layers, like_7 = keras.layers, {"kernel_initializer": keras.initializers.GlorotUniform(7)}
    return keras.Sequential(
        [
            layers.Input((8, 8, 2)),
            layers.Conv2D(16, 3, activation="relu", **like_7),
            layers.Conv2D(16, 3, **like_7),
            layers.Flatten(),
            layers.Dense(64, activation="relu", **like_7),
            layers.Dense(20, dtype=dtype or "float32", **like_7),
        ]
    )


def loss_of(model, x, y):
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True))


class Vectors:
    """Variables whose gradients are what the test says."""

    def __init__(self, **shapes):
        self.variables = [tf.Variable(tf.zeros(shape), name=name) for name, shape in shapes.items()]

    def gradients(self, compression, *gradients, variables=None, **options):
        """What Horovod's tape makes of them."""
        variables = self.variables if variables is None else variables
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables, gradients, strict=True)])
        return hvd.DistributedGradientTape(tape, compression=compression, **options).gradient(loss, variables)


def left(compression, session=None, name=""):
    """All that encoding has left, by name, flat: the residual, and that of the piece of the mean, times the ranks."""
    evaluate = (lambda variables: [v.numpy() for v in variables]) if session is None else session.run
    slots = [slot for slot in compression.slots if name in slot.label]
    return {slot.label: _left(*evaluate([slot.residual, slot.piece_residual, slot.state])) for slot in slots}


def _left(residual, piece, state):
    begin = int(state[2])
    everything = residual.copy()
    everything[begin : begin + piece.size] += hvd.size() * piece
    return everything


def mean_of_ranks(ranks, *shape, step=0):
    """The mean over the ranks of `random`, in float64."""
    return sum(random(*shape, step=step, rank=rank).astype(np.float64) for rank in range(ranks)) / ranks
