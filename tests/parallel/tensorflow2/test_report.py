"""What people see of a compression: the report, and TensorBoard."""

import horovod.tensorflow.keras as hvd_keras
import pytest
import tensorflow as tf
from helpers import Compression, Vectors, batch, convnet, keras, random

from hvd_compress.tensorflow import TensorBoardStats


def fitted(spec, callbacks_of, steps=6, steps_per_execution=1):
    compression = Compression.from_spec(spec)
    model = convnet()
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.05), compression=compression)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, steps_per_execution=steps_per_execution)
    x, y = batch(0, size=16 * steps // 2)
    model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False, callbacks=callbacks_of(compression))
    return compression


def scalars_of(folder):
    """By tag: the values by step, as they were written."""
    found = {}
    for path in folder.rglob("events.out.tfevents.*"):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = tf.make_ndarray(value.tensor)
    return found


def test_the_report_has_what_each_variable_sent():
    vectors = Vectors(a=(100, 200), b=(30, 40), c=(7,))
    compression = Compression.from_spec("topk:fraction=0.1", overrides={"b*": "qsgd:bits=2"})
    assert compression.report().startswith("nothing was sent yet; one process alone sends nothing\n")
    for number in range(3):
        grads = [tf.constant(random(*shape, step=number)) for shape in ((100, 200), (30, 40), (7,))]
        vectors.gradients(compression, *grads)
    _, _, *lines = compression.report().splitlines()
    rows = {line.split()[0]: line.split() for line in lines}
    assert [name.split(":")[0] for name in rows][:3] == ["a", "b", "c"]
    a, b, c = (rows[name] for name in list(rows)[:3])
    total = compression.stats.total.parameters
    assert a[1:3] == ["100x200", "topk:fraction=0.1"]
    assert a[3].startswith("0.bucket.")
    assert a[-3] == "10.000%"
    assert a[-2] == f"{total[a[0]].residual_norm:.3g}"
    assert b[2] == "qsgd:bits=2,bucket=512"
    assert f"{8 * total[b[0]].payload_bytes / 3 / 1200:.3f}" in b
    assert c[2:4] == ["none", "allreduce"]
    assert f"{compression.stats.total.ratio:.1f}" in rows["all"]
    compression.set_codec("onebit")
    assert compression.report().startswith("mean of 3 steps, of this rank; the codec was changed after 3 of them: ")


@pytest.mark.parametrize(("update_freq", "steps"), [("batch", range(1, 7)), (2, [2, 3, 4, 6]), ("epoch", [3, 6])])
def test_keras_writes_what_was_sent(update_freq, steps, tmp_path):
    compression = fitted("adacomp", lambda c: [TensorBoardStats(tmp_path, c, update_freq)])
    found = scalars_of(tmp_path)
    assert sorted(found["hvd_compress/ratio"]) == list(steps)
    step = compression.stats.step
    assert found["hvd_compress/ratio"][6] == pytest.approx(step.ratio)
    assert found["hvd_compress/bytes_sent"][6] == pytest.approx(step.bytes_sent)
    norms = [counters.residual_norm for counters in step.parameters.values() if counters.payload_bytes]
    histogram = found["hvd_compress/parameters/residual_norm"][6]
    assert histogram[:, 2].sum() == len(norms)
    assert (histogram[0, 0], histogram[-1, 1]) == pytest.approx((min(norms), max(norms)))


@pytest.mark.parametrize(("every", "steps"), [(3, [4, 8, 12, 16, 20, 24, 28, 32, 36, 40]), (10, [12, 20, 32, 40])])
def test_batches_are_counted_not_calls(every, steps, tmp_path):
    """Keras calls after each execution, here of four batches."""
    fitted("adacomp", lambda c: [TensorBoardStats(tmp_path, c, every)], steps=40, steps_per_execution=4)
    assert sorted(scalars_of(tmp_path)["hvd_compress/ratio"]) == steps


def test_a_loop_of_ones_own_writes_too(tmp_path):
    vectors, compression = Vectors(w=(60, 70)), Compression.from_spec("cat:cost=bits")
    board = TensorBoardStats(tmp_path, compression, tag="sent")
    board.write()
    for number in range(2):
        vectors.gradients(compression, tf.constant(random(60, 70, step=number)))
        board.write(step=10 + number)
        board.write(step=20 + number)  # there is nothing new
    board.on_train_end()
    found = scalars_of(tmp_path)
    assert sorted(found["sent/selected"]) == [10, 11]
    assert found["sent/selected"][11] == compression.stats.step.selected
    assert found["sent/improvement"][11] == pytest.approx(compression.stats.step.improvement, rel=1e-6)


@pytest.mark.parametrize("update_freq", [0, -1, True, "step", 1.5, None])
def test_an_update_freq_that_is_not_allowed(update_freq, tmp_path):
    with pytest.raises(ValueError, match="is not allowed; allowed is 'batch', 'epoch' or a number from 1 on"):
        TensorBoardStats(tmp_path, Compression.adacomp(), update_freq)


def test_a_compression_without_stats_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no stats"):
        TensorBoardStats(tmp_path, hvd_keras.Compression.fp16)
