"""Times a Keras step under horovodrun, its encode and decode beside the kernels alone, with and without buckets.

All variants take their steps in turn, in one process, each on a model of its own; figures are medians, on rank 0. The kernels
alone encode, and decode as many payloads as there are ranks, ten times as many floats as the model's, in one vector that no
cache holds, on all ranks at once; their time is given for the model's size. TensorFlow gets one thread.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import time
from typing import Any

import numpy as np

from hvd_compress.codecs import Codec, parse
from hvd_compress.vector import Vector

DEFAULT_CODECS = ["adacomp", "qsgd:bits=4", "nuqsgd:bits=4"]
WARM_UP = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--layers", type=int, default=4, help="dense layers (default: %(default)s)")
    parser.add_argument("--width", type=int, default=1600, help="of each (default: %(default)s; 10.2 M parameters)")
    parser.add_argument("--batch", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="(default: %(default)s)")
    parser.add_argument(
        "--codec", action="append", metavar="SPEC", help=f"may be repeated (default: {', '.join(DEFAULT_CODECS)})"
    )
    parser.add_argument(
        "--bucket-bytes",
        action="append",
        type=int,
        metavar="N",
        help="may be repeated; 1 is a message for every tensor, which Horovod fuses (default: 1 and 25 MB)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON")


def run(arguments: argparse.Namespace) -> None:
    """Runs the benchmark; rank 0 prints its table."""
    for name in ("layers", "width", "batch", "steps"):
        if getattr(arguments, name) < 1:
            raise SystemExit(f"--{name} {getattr(arguments, name)} is not allowed; allowed is a whole number from 1 on")
    try:
        codecs = [parse(spec) for spec in arguments.codec or DEFAULT_CODECS]
    except ValueError as error:
        raise SystemExit(f"--codec: {error}") from None
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if importlib.util.find_spec("tf_keras"):
        os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # Horovod's Keras is the one before Keras 3
    import horovod.tensorflow.keras as hvd
    import tensorflow as tf

    from hvd_compress.options import BUCKET_BYTES

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    variants: list[tuple[Codec | None, int]] = [(None, 0)]  # stock Horovod
    variants += [(codec, size) for codec in codecs for size in arguments.bucket_bytes or (1, BUCKET_BYTES)]
    rows = _steps(arguments, variants, hvd, tf)
    shape = (arguments.width, arguments.width)
    kernels = {str(codec): _kernels(codec.for_shape(shape), arguments, hvd.size()) for codec in codecs}
    hvd.allreduce(tf.ones([1]), name="the end")  # nobody leaves while others measure
    if hvd.rank() != 0:
        return
    print(f"{arguments.layers * arguments.width**2} parameters in {arguments.layers} tensors, {hvd.size()} ranks; milliseconds")
    print(
        f"{'codec':20}{'bucket bytes':>14}{'step':>9}{'encode':>9}{'kernel':>9}{'decode':>9}{'kernel':>9}{'both/kernels':>14}"
    )
    for row in rows:
        line = f"{row['codec']:28}{row['bucket_bytes'] or '':>14}{row['step_s'] * 1e3:9.1f}"
        if row["codec"] in kernels:
            row["kernel_encode_s"], row["kernel_decode_s"] = kernels[row["codec"]]
            row["ratio"] = (row["encode_s"] + row["decode_s"]) / sum(kernels[row["codec"]])
            times = (row[key] * 1e3 for key in ("encode_s", "kernel_encode_s", "decode_s", "kernel_decode_s"))
            line += "".join(f"{milliseconds:9.1f}" for milliseconds in times) + f"{row['ratio']:14.2f}"
        print(line)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


def _steps(arguments: argparse.Namespace, variants: list[tuple[Codec | None, int]], hvd: Any, tf: Any) -> list[dict[str, Any]]:
    from hvd_compress.tensorflow import Compression

    random = np.random.default_rng(hvd.rank())
    x, y = random.standard_normal((2, arguments.batch, arguments.width)).astype(np.float32)
    models: list[tuple[Any, Any]] = []
    timed: list[dict[str, list[float]]] = []
    for codec, bucket_bytes in variants:
        compression = hvd.Compression.none if codec is None else Compression.from_spec(str(codec), bucket_bytes=bucket_bytes)
        model = tf.keras.Sequential(
            [tf.keras.layers.Input((arguments.width,))]
            + [tf.keras.layers.Dense(arguments.width, use_bias=False) for _ in range(arguments.layers)]
        )
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1e-3), compression=compression)
        model.compile(optimizer, loss="mse")
        models.append((model, compression))
        timed.append({"step_s": [], "encode_s": [], "decode_s": []})
    for step in range(WARM_UP + arguments.steps):
        for (model, compression), times in zip(models, timed, strict=True):
            start = time.perf_counter()
            model.train_on_batch(x, y)
            if step >= WARM_UP:
                times["step_s"].append(time.perf_counter() - start)
                if compression is not hvd.Compression.none:
                    times["encode_s"].append(compression.stats.step.encode_s)
                    times["decode_s"].append(compression.stats.step.decode_s)
    return [
        {"codec": str(codec) if codec else "none", "bucket_bytes": bucket_bytes}
        | {key: statistics.median(values) for key, values in times.items() if values}
        for (codec, bucket_bytes), times in zip(variants, timed, strict=True)
    ]


def _kernels(codec: Codec, arguments: argparse.Namespace, ranks: int) -> tuple[float, float]:
    """Seconds that the kernels alone take, to encode and to decode the payloads of all ranks."""
    more = 10
    elements = more * arguments.layers * arguments.width**2
    grad = np.random.default_rng(1).standard_normal(elements, dtype=np.float32)
    payload, decoded = np.zeros(codec.max_payload(elements), np.uint8), np.zeros(elements, np.float32)
    residual, spare = (Vector.of(np.zeros(elements, np.float32)) if codec.has_residual else None for _ in range(2))
    encodes, decodes = [], []
    for step in range(WARM_UP + 5):
        start = time.perf_counter()
        encoded = codec.encode(Vector.of(grad), residual, spare, step, Vector.of(payload))
        encodes.append(time.perf_counter() - start)
        residual, spare = spare, residual
        start = time.perf_counter()
        codec.decode([Vector.of(payload).slice(0, encoded.bytes)] * ranks, 1 / ranks, Vector.of(decoded))
        decodes.append(time.perf_counter() - start)
    return statistics.median(encodes[WARM_UP:]) / more, statistics.median(decodes[WARM_UP:]) / more
