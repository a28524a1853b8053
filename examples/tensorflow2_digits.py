"""Trains the same small Keras convnet with one codec after another and shows what each sends and how well it learns.

Run it on two processes of this machine, which takes about a minute::

    TF_USE_LEGACY_KERAS=1 horovodrun -np 2 python examples/tensorflow2_digits.py

All that a Keras script which uses Horovod already has to add: the import of `Compression`, and ``compression=`` in
`hvd.DistributedOptimizer`.
"""

import argparse
import importlib.util
import json
import os
import statistics
import time
from typing import Any

if importlib.util.find_spec("tf_keras"):
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # Horovod's Keras is the one before Keras 3

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from hvd_compress.codecs import parse
from hvd_compress.tensorflow import Compression

CODECS = ["none", "fp16", "adacomp", "qsgd:bits=4", "nuqsgd:bits=4"]
WARMUP_STEPS = 5  # not timed

keras = tf.keras


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codec", action="append", metavar="SPEC", help=f"may be repeated; default: {' '.join(CODECS)}")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=16, help="of each process (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.04)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--data",
        metavar="NPZ",
        help="file with train_images, train_labels, test_images, test_labels; images are uint8, (count, height, width); "
        "default: the 8x8 digits that come with scikit-learn",
    )
    parser.add_argument("--beside", metavar="FILE", help="show the results that pytorch_digits.py --json has written as well")
    parser.add_argument("--json", metavar="FILE", help="write the results")
    return parser.parse_args()


def load_data(path: str | None) -> tuple[np.ndarray, ...]:
    """Images of the training and the test set, shape (height, width, 1), from 0 to 1, each followed by its labels."""
    if path is None:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        split = train_test_split(digits.images, digits.target, test_size=0.25, stratify=digits.target, random_state=0)
        train_images, test_images, train_labels, test_labels = split
    else:
        with np.load(path) as data:
            train_images, train_labels = data["train_images"], data["train_labels"]
            test_images, test_labels = data["test_images"], data["test_labels"]
    scale = train_images.max()
    train_x, test_x = (images[..., None].astype(np.float32) / scale for images in (train_images, test_images))
    return train_x, train_labels, test_x, test_labels


def make_model(shape: tuple[int, ...], classes: int) -> keras.Model:
    """About 280,000 weights for 8x8 images."""
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input(shape),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPool2D(2),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(256, activation="relu"),
            layers.Dense(classes),
        ]
    )


class Progress(keras.callbacks.Callback):
    """Moves the bar, times the steps, and notes after each epoch what was sent so far."""

    def __init__(self, bar: tqdm, spec: str, compression: Any) -> None:
        super().__init__()
        self.bar, self.spec, self.compression = bar, spec, compression
        self.seconds: list[float] = []
        self.sent: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seconds.append(time.perf_counter() - self.start)
        self.bar.update()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        total = self.compression.stats.total
        self.sent.append(total.bytes_sent)
        self.bar.set_postfix(codec=self.spec, loss=f"{logs['loss']:.3f}", ratio=f"{total.ratio:.1f}", refresh=False)


def train(spec: str, args: argparse.Namespace, data: tuple[np.ndarray, ...], bar: tqdm) -> dict[str, Any]:
    """Trains from the same start with one codec; returns its row of the table."""
    keras.utils.set_random_seed(args.seed)
    train_x, train_y, test_x, test_y = data
    model = make_model(train_x.shape[1:], int(train_y.max()) + 1)
    compression = Compression.from_spec(spec)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(args.lr, momentum=0.9), compression=compression)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    progress = Progress(bar, spec, compression)

    # Every process has a share of the images, the same number of them: processes must make the same number of steps.
    share = len(train_x) // hvd.size() // args.batch_size * args.batch_size
    mine = slice(hvd.rank() * share, (hvd.rank() + 1) * share)
    history = model.fit(
        train_x[mine],
        train_y[mine],
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation_data=(test_x, test_y),
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), progress],
        verbose=0,
    ).history

    stats = compression.stats
    accuracy = [100 * value for value in history["val_accuracy"]]
    return {
        "codec": f"{spec} (Keras)",
        "accuracy": accuracy[-1],
        "dense_bytes_per_step": stats.total.bytes_dense / stats.steps,
        "sent_bytes_per_step": stats.total.bytes_sent / stats.steps,
        "ratio": stats.total.ratio,
        "ms_per_step": 1000 * statistics.median(progress.seconds[WARMUP_STEPS:] or progress.seconds),
        "curve": list(zip(progress.sent, accuracy, strict=True)),
    }


def print_table(results: list[dict[str, Any]]) -> None:
    print(f"{'codec':24}{'accuracy %':>11}{'dense KB/step':>15}{'sent KB/step':>14}{'ratio':>8}{'ms/step':>9}")
    for r in results:
        dense, sent = r["dense_bytes_per_step"] / 1e3, r["sent_bytes_per_step"] / 1e3
        print(f"{r['codec']:24}{r['accuracy']:11.1f}{dense:15.1f}{sent:14.1f}{r['ratio']:8.1f}{r['ms_per_step']:9.1f}")


def main() -> None:
    args = parse_args()
    hvd.init()
    if hvd.size() == 1:
        raise SystemExit("one process has nothing to send: run it under horovodrun -np 2")
    tf.config.threading.set_intra_op_parallelism_threads(1)  # the processes share the cores

    specs = args.codec or CODECS
    for spec in specs:
        parse(spec)  # a bad one fails now, not when its turn comes
    data = load_data(args.data)
    steps = len(data[0]) // hvd.size() // args.batch_size * args.epochs
    first = hvd.rank() == 0
    with tqdm(total=steps * len(specs), disable=not first, mininterval=1, ncols=100, unit="step") as bar:
        results = [train(spec, args, data, bar) for spec in specs]

    if first:
        beside = []
        if args.beside:
            with open(args.beside) as file:
                beside = json.load(file)
        print_table(beside + results)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
