"""Trains the same small convnet with one codec after another and shows what each sends and how well it learns.

Run it on two processes of this machine, which takes about a minute::

    horovodrun -np 2 python examples/pytorch_digits.py --plot demo.png

or with codecs and images of your own::

    horovodrun -np 2 python examples/pytorch_digits.py --codec none --codec adacomp:c=3 --data mnist.npz --epochs 2

All that a training script which uses Horovod already has to add: the import of `Compression`, the line that makes one, and
``compression=compression`` in `hvd.DistributedOptimizer`.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

from hvd_compress.codecs import parse
from hvd_compress.torch import Compression

CODECS = ["none", "fp16", "adacomp", "qsgd:bits=4", "nuqsgd:bits=4"]
WARMUP_STEPS = 5  # not timed


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
    parser.add_argument("--plot", metavar="PNG", help="draw accuracy against bytes sent")
    parser.add_argument("--json", metavar="FILE", help="write the results")
    return parser.parse_args()


def load_data(path: str | None) -> tuple[TensorDataset, TensorDataset]:
    """The training and the test set: images of shape (1, height, width) from 0 to 1, and their labels."""
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

    def dataset(images: np.ndarray, labels: np.ndarray) -> TensorDataset:
        scaled = torch.from_numpy(images).float().unsqueeze(1) / train_images.max()
        return TensorDataset(scaled, torch.from_numpy(labels).long())

    return dataset(train_images, train_labels), dataset(test_images, test_labels)


def make_model(classes: int) -> nn.Module:
    """About 280,000 weights, whatever the size of the images."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(4),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 256),
        nn.ReLU(),
        nn.Linear(256, classes),
    )


@torch.no_grad()
def evaluate(model: nn.Module, test_set: TensorDataset) -> float:
    """Accuracy on the test set in percent; each process looks at its share of the images."""
    images, labels = test_set[hvd.rank() :: hvd.size()]
    correct = (model(images).argmax(1) == labels).sum()
    return 100 * hvd.allreduce(correct, op=hvd.Sum, name="correct").item() / len(test_set)


def train(spec: str, args: argparse.Namespace, train_set: TensorDataset, test_set: TensorDataset, bar: tqdm) -> dict[str, Any]:
    """Trains from the same start with one codec; returns its row of the table and its line of the plot."""
    torch.manual_seed(args.seed)
    model = make_model(classes=int(train_set.tensors[1].max()) + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    compression = Compression.from_spec(spec, model.named_parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    seconds, curve = [], []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # shuffles anew
        for images, labels in loader:
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
            bar.set_postfix(codec=spec, loss=f"{loss.item():.3f}", ratio=f"{compression.stats.total.ratio:.1f}", refresh=False)
            bar.update()
        curve.append((compression.stats.total.bytes_sent, evaluate(model, test_set)))

    stats = compression.stats
    return {
        "codec": spec,
        "accuracy": curve[-1][1],
        "dense_bytes_per_step": stats.total.bytes_dense / stats.steps,
        "sent_bytes_per_step": stats.total.bytes_sent / stats.steps,
        "ratio": stats.total.ratio,
        "ms_per_step": 1000 * statistics.median(seconds[WARMUP_STEPS:] or seconds),
        "curve": curve,
    }


def print_table(results: list[dict[str, Any]]) -> None:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "codec": lambda r: r["codec"],
        "accuracy %": lambda r: f"{r['accuracy']:.1f}",
        "dense KB/step": lambda r: f"{r['dense_bytes_per_step'] / 1e3:.1f}",
        "sent KB/step": lambda r: f"{r['sent_bytes_per_step'] / 1e3:.1f}",
        "ratio": lambda r: f"{r['ratio']:.1f}",
        "ms/step": lambda r: f"{r['ms_per_step']:.1f}",
    }
    rows = [list(columns), *([text(r) for text in columns.values()] for r in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for codec, *figures in rows:
        print("  ".join([codec.ljust(widths[0]), *(f.rjust(w) for f, w in zip(figures, widths[1:], strict=True))]))


def draw(results: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for result in results:
        sent, accuracy = zip(*result["curve"], strict=True)
        label = f"{result['codec']} ({result['ratio']:.0f})"
        axes.plot([s / 1e6 for s in sent], accuracy, marker=".", label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("sent by each process since the start (MB)")
    axes.set_ylabel("test accuracy (%)")
    axes.set_title("What a byte on the wire buys: accuracy after each epoch")
    axes.grid(alpha=0.3)
    axes.legend(title="codec (times fewer bytes than dense)")
    figure.savefig(path, dpi=150)


def main() -> None:
    args = parse_args()
    hvd.init()
    if hvd.size() == 1:
        raise SystemExit("one process has nothing to send: run it under horovodrun -np 2")
    torch.set_num_threads(1)  # the processes share the cores

    specs = args.codec or CODECS
    for spec in specs:
        parse(spec)  # a bad one fails now, not when its turn comes
    train_set, test_set = load_data(args.data)
    steps = -(-len(train_set) // (hvd.size() * args.batch_size)) * args.epochs
    first = hvd.rank() == 0
    with tqdm(total=steps * len(specs), disable=not first, mininterval=1, ncols=100, unit="step") as bar:
        results = [train(spec, args, train_set, test_set, bar) for spec in specs]

    if first:
        print_table(results)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(results, file, indent=2)
        if args.plot:
            draw(results, args.plot)


if __name__ == "__main__":
    main()
