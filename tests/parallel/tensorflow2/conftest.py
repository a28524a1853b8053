"""TensorFlow's side of ../conftest.py. Every test runs twice: with each exchange, whichever "auto" would choose."""

import helpers
import horovod.tensorflow as hvd
import pytest
import tensorflow as tf


@pytest.fixture(scope="session", autouse=True)
def _horovod():
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()


@pytest.fixture(autouse=True)
def _same_start(_horovod):
    tf.keras.utils.set_random_seed(1)


@pytest.fixture(scope="session")
def ranks(_horovod):
    return hvd.size()


@pytest.fixture(autouse=True, params=["allgather", "scatter-gather"])
def exchange(request, monkeypatch):
    monkeypatch.setattr(helpers, "EXCHANGE", request.param)
    return request.param
