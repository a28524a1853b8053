"""TensorFlow 1's graphs and sessions, with both of its kinds of control flow."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from helpers import Compression, assert_equal_on_all_ranks, gather, left, mean_of_ranks, random
from parallel.common import SPECS, WITH_RESIDUAL

v1 = tf.compat.v1


@pytest.fixture(params=["control flow 1", "control flow 2"])
def graph(request):
    enabled = v1.control_flow_v2_enabled()
    (v1.disable_control_flow_v2 if request.param.endswith("1") else v1.enable_control_flow_v2)()
    try:
        with tf.Graph().as_default() as graph:
            yield graph
    finally:
        (v1.enable_control_flow_v2 if enabled else v1.disable_control_flow_v2)()


class Training:
    """Minimizes a sum whose gradients are what is fed."""

    def __init__(self, compression, resource=True, scope="model", **options):
        with v1.variable_scope(scope, use_resource=resource):
            self.a = v1.get_variable("a", [40, 50], initializer=v1.constant_initializer(float(hvd.rank())))
            self.b = v1.get_variable("b", [3], initializer=v1.zeros_initializer())
        self.feeds = [v1.placeholder(tf.float32, v.shape) for v in (self.a, self.b)]
        loss = tf.reduce_sum(self.a * self.feeds[0]) + tf.reduce_sum(self.b * self.feeds[1])
        self.optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), compression=compression, **options)
        self.train = self.optimizer.minimize(loss, var_list=[self.a, self.b])
        self.broadcast = hvd.broadcast_global_variables(0)

    def feed(self, step):
        return {self.feeds[0]: random(40, 50, step=step), self.feeds[1]: random(3, step=step)}


@pytest.mark.parametrize("initializer", ["initialized", "not initialized"])
@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
@pytest.mark.parametrize("spec", SPECS)
def test_training(spec, resource, initializer, graph, ranks):
    compression = Compression.from_spec(spec)
    training = Training(compression, resource)
    local = [v.op.name for v in v1.local_variables()]
    assert not any("hvd_compress" in v.op.name for v in v1.global_variables())
    assert len(local) == 6
    expected_a, expected_b = np.zeros((40, 50)), np.zeros(3)
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        if initializer == "initialized":
            session.run(v1.local_variables_initializer())
        session.run(training.broadcast)
        for step in range(5):
            session.run(training.train, training.feed(step))
            assert_equal_on_all_ranks(session.run([training.a, training.b]))
            expected_a -= mean_of_ranks(ranks, 40, 50, step=step)
            expected_b -= mean_of_ranks(ranks, 3, step=step)
        a, b = session.run([training.a, training.b])
        assert compression.stats.steps == 5
        if spec in WITH_RESIDUAL:
            of_all = gather(left(compression, session, "model/a")["model/a"])
            assert len({r.tobytes() for r in of_all}) == ranks  # each rank's own, the broadcast did not touch them
            np.testing.assert_allclose(a - sum(of_all).reshape(40, 50) / ranks, expected_a, atol=2e-5)
    np.testing.assert_allclose(b, expected_b, atol=0.02 if spec == "fp16" else 1e-5)


def test_a_broadcast_in_mid_training_leaves_the_residuals_alone(graph):
    compression = Compression.adacomp()
    training = Training(compression)
    with v1.Session() as session:
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        session.run(training.train, training.feed(0))
        before = session.run(compression.slots[0].residual)
        session.run(training.broadcast)
        np.testing.assert_array_equal(session.run(compression.slots[0].residual), before)
        assert len({r.tobytes() for r in gather(before)}) > 1


@pytest.mark.skipif(not hasattr(hvd, "BroadcastGlobalVariablesHook"), reason="needs a TensorFlow that has tf.estimator")
def test_the_broadcast_hook(graph):
    compression = Compression.adacomp()
    training = Training(compression)
    hooks = [hvd.BroadcastGlobalVariablesHook(0)]
    with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
        for step in range(3):
            session.run(training.train, training.feed(step))
        assert_equal_on_all_ranks(session.run([training.a, training.b]))
        residual = session.run(compression.slots[0].residual)
    assert len({r.tobytes() for r in gather(residual)}) > 1


@pytest.mark.parametrize("spec", WITH_RESIDUAL)
def test_backward_passes_per_step(spec, graph):
    """In TensorFlow 1's control flow that is a tf.cond around ours: what is sent stays in it."""
    compression = Compression.from_spec(spec)
    training = Training(compression, backward_passes_per_step=2)
    twin = Training(Compression.from_spec(spec), scope="twin")
    with v1.Session() as session:
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        session.run(training.broadcast)
        session.run(twin.broadcast)
        for step in range(6):
            session.run(training.train, training.feed(step))
            if step % 2:
                both = [training.feed(step - 1), training.feed(step)]
                sums = [sum(feed[place] for feed in both) for place in training.feeds]
                session.run(twin.train, dict(zip(twin.feeds, sums, strict=True)))
        a, expected = session.run([training.a, twin.a])
    assert compression.stats.steps == 3
    assert_equal_on_all_ranks([a])
    np.testing.assert_array_equal(a, expected)


def test_only_some_of_the_results_are_asked_for(graph, ranks):
    """A session that runs only a part of the graph: the other gradients are not lost."""
    compression = Compression.adacomp()
    a, b = (v1.get_variable(name, [40, 50], initializer=v1.zeros_initializer()) for name in "ab")
    feed = v1.placeholder(tf.float32, [40, 50])
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), compression=compression)
    (of_a, _), (of_b, _) = optimizer.compute_gradients(tf.reduce_sum((a + 2 * b) * feed), [a, b])
    total = 0
    with v1.Session() as session:
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        for step in range(4):
            total = total + session.run(of_a, {feed: random(40, 50, step=step)})
        expected = sum(mean_of_ranks(ranks, 40, 50, step=step) for step in range(4))
        remains = sum(np.asarray(r, np.float64) for r in gather(left(compression, session, "a")["a"])) / ranks
        np.testing.assert_allclose(total + remains.reshape(40, 50), expected, atol=2e-5)
        first = session.run(of_b, {feed: random(40, 50, step=9)})
        remains = sum(np.asarray(r, np.float64) for r in gather(left(compression, session, "b")["b"])) / ranks
        np.testing.assert_allclose(first + remains.reshape(40, 50), 2 * mean_of_ranks(ranks, 40, 50, step=9), atol=2e-5)


def test_checkpoints(graph, tmp_path):
    """In one graph: train, save, train on, restore, and train on again, bitwise alike."""
    compression = Compression.nuqsgd(error_feedback=True)
    training = Training(compression)
    checkpoint = tf.train.Checkpoint(compression=compression, a=training.a)
    with v1.Session() as session:
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        session.run(training.broadcast)
        session.run(training.train, training.feed(0))
        path = checkpoint.write(str(tmp_path / "checkpoint"))
        session.run(training.train, training.feed(1))
        once = session.run([training.a, compression.slots[0].residual])
        checkpoint.restore(path).run_restore_ops(session)
        session.run(training.train, training.feed(1))
        for a, b in zip(session.run([training.a, compression.slots[0].residual]), once, strict=True):
            np.testing.assert_array_equal(a, b)
