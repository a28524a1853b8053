"""The ways in which Horovod's optimizers and tapes are used."""

import warnings

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
from parallel.common import WITH_RESIDUAL

SPEC = "qsgd:bits=8,error_feedback=true"
ALL = {"overrides": {"*": SPEC}}
"""Small variables too: the order in which Horovod itself adds on more than two ranks depends on what it happens to fuse."""


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def fitted(optimizer_options=None, compression=None, fit_options=None, model=None, epochs=2):
    """The variables of a convnet after `fit`, and the compression."""
    keras.utils.set_random_seed(1)
    model = convnet() if model is None else model
    compression = Compression.from_spec(SPEC, **ALL) if compression is None else compression
    optimizer = hvd_keras.DistributedOptimizer(
        keras.optimizers.SGD(0.05), compression=compression, **(optimizer_options(model) if optimizer_options else {})
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **(fit_options or {}))
    x, y = batch(0, size=64)
    model.fit(x, y, batch_size=16, epochs=epochs, verbose=0, shuffle=False)
    assert_equal_on_all_ranks(model.trainable_variables)
    return model.trainable_variables, compression


_plain = {}


@pytest.fixture
def plain(exchange):
    if exchange not in _plain:
        _plain[exchange] = fitted()
    return _plain[exchange]


# --- in a graph


def test_no_gradient_waits_for_another():
    """TensorFlow puts stateful ops one behind the other, unless it sees that they have nothing to do with each other."""
    model = convnet()
    compression = Compression.from_spec(SPEC, bucket_bytes=1)  # a message for each
    traced = []

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        traced.extend(tape.gradient(loss, model.trainable_variables))
        return tf.add_n([tf.reduce_sum(gradient) for gradient in traced])

    step.get_concrete_function(*(tf.constant(value) for value in batch(0)))

    def needed_by(op, known):
        for before in [*(tensor.op for tensor in op.inputs), *op.control_inputs]:
            if before not in known:
                known.add(before)
                needed_by(before, known)
        return known

    assert len(traced) == 8
    for gradient in traced:
        before = needed_by(gradient.op, {gradient.op})
        starts = [op for op in before if op.type in ("HvdCompressEncode", "HvdCompressArrive")]
        assert len(starts) == 1
        assert not [op.type for op in needed_by(starts[0], set()) if op.type.startswith("HvdCompress")]


# --- options of the optimizer


@pytest.mark.parametrize(
    "options",
    [
        lambda model: {"num_groups": 2},
        lambda model: {"groups": 1},
        lambda model: {"groups": 3},
        lambda model: {
            "groups": [model.trainable_variables[:3], model.trainable_variables[3:7], model.trainable_variables[7:]]
        },
    ],
    ids=["num_groups", "one group", "three groups", "lists"],
)
def test_groups_change_nothing(options, plain):
    got, compression = fitted(options)
    assert_same(got, plain[0])
    assert compression.stats.total.bytes_sent == plain[1].stats.total.bytes_sent


def test_several_steps_in_one_execution(plain):
    got, compression = fitted(fit_options={"steps_per_execution": 4})
    assert_same(got, plain[0])
    assert compression.stats.steps == 8


def test_predivide_factor(plain):
    got, _ = fitted(lambda _: {"gradient_predivide_factor": 2.0})
    assert_same(got, plain[0])


@pytest.mark.parametrize("options", [{}, {"groups": 2}], ids=["ungrouped", "grouped"])
def test_a_sum_is_as_many_means(options, ranks):
    def result(op):
        vectors = Vectors(a=(40, 50), b=(3,))
        compression = Compression.from_spec(SPEC)
        grads = [tf.constant(random(40, 50)), tf.constant(random(3))]
        for _ in range(2):
            got = vectors.gradients(compression, *grads, op=op, **options)
        return got

    for a, b in zip(result(hvd.Sum), result(hvd.Average), strict=True):
        np.testing.assert_allclose(a, b * ranks, rtol=1e-6, atol=2e-6)  # the summands are about 3 and cancel


def test_keras_optimizer_with_a_sum(ranks):
    """A sum with a learning rate of 1 / ranks is the mean with 1."""
    results = []
    for op, rate in ((hvd.Sum, 0.05 / ranks), (hvd.Average, 0.05)):
        model = keras.Sequential([keras.layers.Input((40,)), keras.layers.Dense(40)])
        optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(rate), compression=Compression.from_spec(SPEC), op=op)
        keras.utils.set_random_seed(3)
        model.layers[-1].set_weights([np.ones((40, 40)) / 40, np.zeros(40)])
        model.compile(optimizer, "mse")
        model.fit(random(32, 40), random(32, 40, step=1), batch_size=16, epochs=2, verbose=0, shuffle=False)
        results.append([v.numpy() for v in model.trainable_variables])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("spec", WITH_RESIDUAL)
def test_backward_passes_per_step(spec, ranks):
    """The sum of two batches' gradients is what is sent, every second time."""
    compression = Compression.from_spec(spec)
    twin = Compression.from_spec(spec)
    model = keras.Sequential([keras.layers.Input((40,)), keras.layers.Dense(40, use_bias=False)])
    w = model.trainable_variables[0]
    w.assign(tf.zeros_like(w))
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression, backward_passes_per_step=2)
    model.compile(optimizer, loss=lambda y, out: tf.reduce_sum(out * y))  # whose gradient does not depend on the weights
    x, y = random(64, 40), random(64, 40, step=1)
    model.fit(x, y, batch_size=8, epochs=1, verbose=0, shuffle=False)
    assert compression.stats.steps == 4
    assert_equal_on_all_ranks([w])

    vectors, expected = Vectors(w=(40, 40)), np.zeros((40, 40), np.float32)
    for step in range(4):
        grad = sum(tf.matmul(x[i : i + 8], y[i : i + 8], transpose_a=True) for i in (16 * step, 16 * step + 8))
        expected -= vectors.gradients(twin, grad)[0].numpy()
    np.testing.assert_allclose(w.numpy(), expected, atol=1e-4)


def test_only_averages_and_sums(ranks):
    for op in (hvd.Min, hvd.Max, hvd.Product):
        with pytest.raises(ValueError, match=r"op=hvd\.Average and op=hvd\.Sum"):
            Vectors(a=(40, 40)).gradients(Compression.from_spec(SPEC), tf.ones([40, 40]), op=op)


def test_registered_local_variables_stay_local(ranks):
    vectors = Vectors(a=(40, 50), b=(40, 50))
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(v * random(40, 50)) for v in vectors.variables])
    tape = hvd.DistributedGradientTape(tape, compression=Compression.bf16())
    tape.register_local_source(vectors.variables[1])
    ours, local = tape.gradient(loss, vectors.variables)
    np.testing.assert_allclose(local, random(40, 50) / ranks, rtol=1e-6)
    np.testing.assert_allclose(ours, mean_of_ranks(ranks, 40, 50), atol=0.02)


# --- gradients of all kinds


@pytest.mark.parametrize("as_dense", [False, True], ids=["sparse", "sparse_as_dense"])
@pytest.mark.parametrize("how", ["eager", "function"])
def test_embeddings(how, as_dense, ranks):
    table, w = tf.Variable(tf.ones([50, 30])), tf.Variable(tf.ones([30, 40]))
    compression = Compression.bf16()

    def step(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows) @ w)
        tape = hvd.DistributedGradientTape(tape, compression=compression, sparse_as_dense=as_dense)
        return tape.gradient(loss, [table, w])

    step = tf.function(step) if how == "function" else step
    for _ in range(2):
        of_table, of_w = step(tf.constant([hvd.rank(), 7, 7]))
    assert isinstance(of_table, tf.Tensor) == as_dense
    expected = np.zeros((50, 30))
    for rank in range(ranks):
        np.add.at(expected, [rank, 7, 7], 40.0 / ranks)
    np.testing.assert_allclose(tf.convert_to_tensor(of_table), expected, rtol=1e-2)
    np.testing.assert_allclose(of_w, np.full((30, 40), 3.0), rtol=1e-2)
    names = [slot.label for slot in compression.slots]
    assert len(names) == (2 if as_dense else 1)


@pytest.mark.parametrize("as_dense", [False, True], ids=["sparse", "sparse_as_dense"])
def test_overrides_can_name_what_has_a_sparse_gradient(as_dense):
    """As embeddings have."""
    table, w = tf.Variable(tf.ones([40, 50]), name="embedding/embeddings"), tf.Variable(tf.ones([50, 30]), name="w")
    compression = Compression.adacomp(overrides={"*/embeddings": "none"})
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [1, 3]) @ w) / 30
    tape = hvd.DistributedGradientTape(tape, compression=compression, sparse_as_dense=as_dense)
    gradient = tf.convert_to_tensor(tape.gradient(loss, [table, w])[0])
    expected = np.zeros((40, 50))
    expected[[1, 3]] = 1
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_gradients_that_are_missing_or_the_same():
    a, b, unused = (tf.Variable(tf.zeros([40, 30]), name=name) for name in ("a", "b", "unused"))
    compression = Compression.none(min_numel=0, overrides={"*": "bf16"})

    @tf.function
    def step(g):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((a + b) * g)  # the gradients of a and b are one tensor
        return hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, [a, unused, b])

    of_a, nothing, of_b = step(tf.ones([40, 30]))
    assert nothing is None
    assert_same([of_a, of_b], [np.ones((40, 30))] * 2)
    assert sorted(compression.stats.step.parameters) == ["a", "b"]


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
@pytest.mark.parametrize("spec", ["qsgd:bits=8,error_feedback=true", "none", "fp16"])
def test_other_dtypes(dtype, spec, ranks):
    w = tf.Variable(tf.zeros([40, 50], dtype))
    compression = Compression.from_spec(spec)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(w * tf.cast(random(40, 50), dtype))
    (got,) = hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, [w])
    assert got.dtype == dtype
    if not spec.startswith("qsgd"):
        np.testing.assert_allclose(tf.cast(got, tf.float64), mean_of_ranks(ranks, 40, 50), atol=0.03)
    assert_equal_on_all_ranks([tf.cast(got, tf.float64)])


def test_variables_of_whole_numbers_and_no_elements(ranks):
    w, nothing = tf.Variable(tf.ones([40, 50])), tf.Variable(tf.zeros([0, 5]))
    compression = Compression.qsgd(min_numel=0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(w * 2) + tf.reduce_sum(nothing)
    got = hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, [w, nothing])
    assert got[1].shape == [0, 5]
    assert compression.stats.steps == 1


def test_a_tensor_that_is_no_gradient_is_left_to_horovod(ranks):
    compression = Compression.qsgd(bits=2)
    with pytest.warns(UserWarning, match=r"of shape \(40, 50\) is not a gradient that hvd\.DistributedOptimizer"):
        got = hvd.allreduce(tf.constant(random(40, 50)), compression=compression)
    np.testing.assert_allclose(got, mean_of_ranks(ranks, 40, 50), atol=1e-6)
    scattered = hvd.reducescatter(tf.ones([4 * ranks, 3]), compression=compression)
    assert_same([scattered], [np.ones((4, 3))])


def test_a_model_of_keras_3(ranks):
    keras_3 = pytest.importorskip("keras", minversion="3", reason="needs the package keras 3")
    keras_3.utils.set_random_seed(2)
    model = keras_3.Sequential([keras_3.layers.Input((40,)), keras_3.layers.Dense(50, name="hidden"), keras_3.layers.Dense(3)])
    variables = [v.value for v in model.trainable_variables]
    compression = Compression.adacomp()
    optimizer = keras_3.optimizers.Adam(0.01)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        optimizer.apply(tape.gradient(loss, variables), model.trainable_variables)
        return loss

    losses = []
    for i in range(10):
        losses.append(float(step(tf.constant(random(16, 40, step=i)))))
        assert_equal_on_all_ranks(variables)
    assert losses[-1] < losses[0]
    assert any("hidden/kernel" in name for name in compression.stats.step.parameters)


# --- tracing


def test_tracing_again_keeps_the_residuals():
    """Another batch size traces anew, on one rank alone too; a model that is called for evaluation in between as well."""

    def results(sizes):
        vectors = Vectors(w=(40, 50))
        compression = Compression.from_spec(SPEC)
        traces = []

        @tf.function
        def step(x, training):
            traces.append(None)
            return vectors.gradients(compression, tf.reduce_sum(x, 0) if training else tf.zeros([40, 50]))[0]

        got = []
        for i, size in enumerate(sizes):
            x = np.zeros((size, 40, 50), np.float32)
            x[0] = random(40, 50, step=i)
            got.append(step(tf.constant(x), True))
        return got, compression, len(traces)

    expected, first, once = results([4] * 6)
    sizes = [4, 3, 4, 2, 3, 4] if hvd.rank() == 0 else [4] * 6
    got, second, traces = results(sizes)
    assert traces == once + (2 if hvd.rank() == 0 else 0)
    assert_same(got, expected)
    assert len(second.slots) == 1
    assert_same(left(second).values(), left(first).values())


def test_fit_evaluate_and_fit_again(plain):
    model, compression = convnet(), Compression.from_spec(SPEC, **ALL)
    keras.utils.set_random_seed(1)
    x, y = batch(0, size=64)
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.05), compression=compression)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    for _ in range(2):
        model.fit(x, y, batch_size=16, epochs=1, verbose=0, shuffle=False)
        model.evaluate(x[:10], y[:10], verbose=0)
        model.predict(x[:7], verbose=0)
    assert_same(model.trainable_variables, plain[0])


def test_two_steps_in_one_function():
    def results(steps_at_once):
        vectors, compression = Vectors(w=(40, 50), v=(30, 40)), Compression.from_spec(SPEC)

        @tf.function
        def run(ws, vs):
            return [vectors.gradients(compression, w, v) for w, v in zip(tf.unstack(ws), tf.unstack(vs), strict=True)]

        got = []
        for i in range(0, 4, steps_at_once):
            steps = range(i, i + steps_at_once)
            got += run(tf.stack([random(40, 50, step=s) for s in steps]), tf.stack([random(30, 40, step=s) for s in steps]))
        return [tensor for step in got for tensor in step], compression

    expected, _ = results(1)
    got, compression = results(2)
    assert_same(got, expected)
    assert len(compression.slots) == 2
    assert compression.stats.steps == 4


def test_some_of_the_variables_now_and_all_of_them_later():
    vectors, compression = Vectors(a=(40, 50), b=(30, 40)), Compression.from_spec(SPEC, exchange="allgather")
    grads = [tf.constant(random(40, 50)), tf.constant(random(30, 40))]
    vectors.gradients(compression, grads[0], variables=vectors.variables[:1])
    before = left(compression)["a"]
    twin = Compression.from_spec(SPEC, exchange="allgather")
    vectors.gradients(twin, *grads)
    np.testing.assert_array_equal(before, left(twin)["a"])
    vectors.gradients(compression, *grads)
    vectors.gradients(twin, *grads)
    np.testing.assert_array_equal(left(compression)["a"], left(twin)["a"])
    assert len(compression.plans) == 2


def test_two_optimizers_with_two_compressions():
    """A generator and a discriminator in one function."""
    generator, discriminator = (tf.Variable(tf.ones([40, 40]) / 40, name=name) for name in ("g", "d"))
    compressions = [Compression.adacomp(bin=50), Compression.from_spec(SPEC)]

    @tf.function
    def step(x):
        with tf.GradientTape() as of_g, tf.GradientTape() as of_d:
            out = x @ generator @ discriminator
            losses = tf.reduce_mean(out**2), -tf.reduce_mean(out)
        of_g = hvd.DistributedGradientTape(of_g, compression=compressions[0])
        of_d = hvd.DistributedGradientTape(of_d, compression=compressions[1])
        generator.assign_sub(0.1 * of_g.gradient(losses[0], [generator])[0])
        discriminator.assign_sub(0.1 * of_d.gradient(losses[1], [discriminator])[0])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(5):
            step(tf.constant(random(8, 40, step=i)))
            assert_equal_on_all_ranks([generator, discriminator])
    assert [list(c.stats.step.parameters) for c in compressions] == [["g"], ["d"]]


def test_a_compression_that_is_made_anew_in_every_step_is_noticed():
    vectors = Vectors(weights=(40, 50))

    def train():
        for _ in range(3):
            vectors.gradients(Compression.from_spec(SPEC), tf.ones([40, 50]))

    with pytest.warns(UserWarning, match="'weights' has had 3 compressions: one that is made anew at every step"):
        train()


def test_a_compression_that_two_models_share_is_noticed():
    one, other, compression = Vectors(w=(40, 50)), Vectors(w=(40, 50)), Compression.from_spec(SPEC)
    one.gradients(compression, tf.ones([40, 50]))
    with pytest.warns(UserWarning, match="one compression is used for two models"):
        other.gradients(compression, tf.ones([40, 50]))


def test_a_compression_of_one_model_gives_no_warning():
    vectors, compression = Vectors(w=(40, 50)), Compression.from_spec(SPEC)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(3):
            vectors.gradients(compression, tf.fill([40, 50], float(i)))


# --- policy, plan and stats


def test_names_overrides_and_stats(ranks):
    keras.backend.clear_session()
    model = convnet()
    names = [v.name.split(":")[0] for v in model.trainable_variables]
    compression = Compression.nuqsgd(overrides={"dense*/kernel": "none", "conv2d_1*": "adacomp:bin=50"}, bucket_bytes=10_000)
    fitted(compression=compression, model=model)
    (plan,) = compression.plans
    specs = {s.parameter.name: str(s.codec) for s in plan.segments}
    assert list(specs) == names
    assert specs["dense/kernel"] == "none"
    assert specs["conv2d_1/kernel"] == "adacomp:bin=50,c=2"
    assert specs["conv2d/kernel"] == "none"  # it is small
    stats = compression.stats
    assert stats.steps == 8
    assert set(stats.step.parameters) == set(names)
    ring = 2 * (ranks - 1) / ranks
    dense = {n: ring * 4 * int(np.prod(v.shape)) for n, v in zip(names, model.trainable_variables, strict=True)}
    assert {n: c.bytes_dense for n, c in stats.step.parameters.items()} == pytest.approx(dense)
    assert stats.total.bytes_dense == pytest.approx(8 * sum(dense.values()))
    assert stats.step.parameters["dense/kernel"].bytes_sent == dense["dense/kernel"]
    one = stats.step.parameters["conv2d_1/kernel"]
    assert 0 < one.bytes_sent < dense["conv2d_1/kernel"] / 10
    assert one.selected > 0
    assert one.residual_norm > 0
    assert stats.total.encode_s > 0
    assert stats.total.decode_s > 0
    assert sum(c.bytes_sent for c in stats.total.parameters.values()) == pytest.approx(stats.total.bytes_sent)


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match="the pattern 'kernel' matches no parameter; there are 'w'"):
        Vectors(w=(40, 50)).gradients(Compression.qsgd(overrides={"kernel": "none"}), tf.ones([40, 50]))


def test_small_buckets_change_nothing():
    """Of what is gathered; in a scatter-gather they decide which rank encodes what again."""
    expected, _ = fitted(compression=Compression.from_spec(SPEC, exchange="allgather", **ALL))
    got, compression = fitted(compression=Compression.from_spec(SPEC, bucket_bytes=1, exchange="allgather", **ALL))
    assert_same(got, expected)
    assert len(compression.plans[0].buckets) == 8


def test_another_codec_in_mid_training(ranks):
    vectors, compression = Vectors(a=(40, 50), b=(3,)), Compression.adacomp()
    step = tf.function(lambda *gradients: vectors.gradients(compression, *gradients))
    total = np.zeros((40, 50))
    for i, spec in enumerate(["adacomp", "adacomp:bin=50", "none", "qsgd:bits=8,error_feedback=true", "fp16", "none"]):
        compression.set_codec(spec)
        assert str(compression).startswith(spec.split(":")[0])
        of_a, of_b = step(tf.constant(random(40, 50, step=i)), tf.constant(random(3, step=i)))
        total += of_a.numpy()
        assert_equal_on_all_ranks([of_a, of_b])
        np.testing.assert_allclose(of_b, mean_of_ranks(ranks, 3, step=i), atol=1e-6)
    expected = sum(mean_of_ranks(ranks, 40, 50, step=i) for i in range(6))
    np.testing.assert_allclose(total, expected, atol=2e-3)  # half precision in one step


def test_nothing_is_lost_when_pieces_move(ranks):
    """Other variables in the bucket, or another codec, make other pieces: what was left of the old ones is sent too."""
    vectors, compression = Vectors(a=(40, 50), b=(30, 40)), Compression.adacomp(exchange="scatter-gather")
    total = np.zeros((40, 50))
    for i in range(8):
        if i == 6:
            compression.set_codec("onebit")
        grads = [tf.constant(random(40, 50, step=i)), tf.constant(random(30, 40, step=i))][: 1 + i % 2]
        of_a, *_ = vectors.gradients(compression, *grads, variables=vectors.variables[: len(grads)])
        total += of_a.numpy()
    remains = sum(theirs.astype(np.float64) for theirs in gather(left(compression)["a"])).reshape(40, 50) / ranks
    np.testing.assert_allclose(total + remains, sum(mean_of_ranks(ranks, 40, 50, step=i) for i in range(8)), atol=5e-5)


def test_what_is_traced_dense_stays_dense():
    vectors, compression = Vectors(a=(40, 50), b=(50, 40)), Compression.none()
    vectors.gradients(compression, tf.ones([40, 50]), tf.ones([50, 40]))
    with pytest.warns(UserWarning, match="'a' and 1 others stay dense"):
        compression.set_codec("adacomp")
    got = vectors.gradients(compression, tf.ones([40, 50]), tf.ones([50, 40]))
    assert_same(got, [np.ones((40, 50)), np.ones((50, 40))])


def test_tracing_again_on_one_rank_leaves_dense_what_was(ranks):
    """After set_codec() too: what a new trace hands to Horovod is what the old ones of the other ranks do."""
    vectors, compression = Vectors(a=(40, 50)), Compression.fp16()
    step = tf.function(lambda x: vectors.gradients(compression, tf.reduce_sum(x, 0))[0])
    step(tf.ones([2, 40, 50]))
    compression.set_codec("none")
    size = 3 if hvd.rank() == 0 else 2
    got = step(tf.ones([size, 40, 50]))
    np.testing.assert_allclose(got, np.full((40, 50), (3 + 2 * (ranks - 1)) / ranks), rtol=1e-3)
