"""What the papers' experiments have in common: data, a training that can be resumed, and the table of results."""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from hvd_compress.codecs import parse
from hvd_compress.torch import Compression

Batch = tuple[torch.Tensor, torch.Tensor]
KINDS = {
    nn.Conv2d: "conv",
    nn.Linear: "fc",
    nn.LSTM: "recurrent",
    nn.Embedding: "embedding",
    nn.MultiheadAttention: "attention",
}
"""What the papers call a layer."""


# --- data


def parse_args(description: str, tasks: Iterable[str], specs: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--task", action="append", choices=list(tasks), help="may be repeated; default: all")
    parser.add_argument("--codec", metavar="SPEC", action="append", help=f"may be repeated; default: {', '.join(specs)}")
    parser.add_argument(
        "--data",
        metavar="FOLDER",
        help="with mnist*.npz (as keras.datasets.mnist.load_data() keeps it), cifar10*.npz or torchvision's "
        "cifar-10-batches-py, *shakespeare*.txt; default for images: the digits that come with scikit-learn, "
        "for text: the help on topics that comes with Python",
    )
    parser.add_argument("--out", metavar="FOLDER", default="papers", help="results and checkpoints (default: %(default)s)")
    parser.add_argument("--seed", type=int, action="append", help="may be repeated (default: 0)")
    parser.add_argument("--full", action="store_true", help="larger models and more epochs: hours")
    args = parser.parse_args()
    args.seed = args.seed or [0]
    args.name = [*(args.codec or []), *(["full"] if args.full else []), *map(str, args.seed)]
    args.codec = args.codec or specs
    for spec in args.codec:
        if spec not in specs:
            try:
                parse(spec)
            except ValueError as error:
                parser.error(f"--codec {spec}: {error}")
    return args


@dataclasses.dataclass
class Images:
    """A training and a test set: images float32 (count, channels, height, width) about zero, and labels."""

    name: str
    train: Batch
    test: Batch


def images(folder: str | None, name: str) -> Images:
    """The images called so ("mnist" or "cifar10") in a folder; scikit-learn's digits in their place without one."""
    if folder is None:
        parts = _digits(name)
        name = f"digits instead of {name}"
    elif found := [file for file in sorted(Path(folder).glob("*.npz")) if re.match(rf"{name}(?!\d)", file.name)]:
        with np.load(found[0]) as data:
            parts = _arrays(data)
    elif name == "cifar10" and (Path(folder) / "cifar-10-batches-py").is_dir():
        parts = _batches(Path(folder) / "cifar-10-batches-py")
    else:
        other = " and no cifar-10-batches-py" if name == "cifar10" else ""
        raise SystemExit(f"--data {folder}: {_what_is(folder)}no {name}*.npz{other}")
    mean, deviation = parts["train_images"].mean(), parts["train_images"].std()

    def batch(part: str) -> Batch:
        scaled = (torch.from_numpy(np.ascontiguousarray(parts[f"{part}_images"])).float() - float(mean)) / float(deviation)
        return scaled, torch.from_numpy(np.asarray(parts[f"{part}_labels"])).long().flatten()

    return Images(name, batch("train"), batch("test"))


def _what_is(folder: str) -> str:
    return "there is " if Path(folder).is_dir() else "there is no such folder, so "


def _digits(name: str) -> dict[str, np.ndarray]:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    channels, scale, margin = (1, 3, 2) if name == "mnist" else (3, 4, 0)  # 28 or 32 pixels
    larger = np.kron(digits.images, np.ones((scale, scale)))
    larger = np.pad(larger, ((0, 0), (margin, margin), (margin, margin)))
    stacked = np.repeat(larger[:, None], channels, 1)
    split = train_test_split(stacked, digits.target, test_size=0.25, stratify=digits.target, random_state=0)
    return dict(zip(("train_images", "test_images", "train_labels", "test_labels"), split, strict=True))


def _arrays(data: Any) -> dict[str, np.ndarray]:
    parts = {}
    for part in ("train", "test"):
        if f"{part}_jpeg" in data:
            from PIL import Image

            jpeg, offsets = data[f"{part}_jpeg"], data[f"{part}_offsets"]
            one = [np.asarray(Image.open(io.BytesIO(jpeg[a:b].tobytes()))) for a, b in itertools.pairwise(offsets)]
            pixels = np.stack(one)
        else:
            pixels = data[f"{part}_images"] if f"{part}_images" in data else data[f"x_{part}"]
        labels = data[f"{part}_labels"] if f"{part}_labels" in data else data[f"y_{part}"]
        parts[f"{part}_images"] = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
        parts[f"{part}_labels"] = labels
    return parts


def _batches(folder: Path) -> dict[str, np.ndarray]:
    import pickle

    parts = {}
    for part, pattern in (("train", "data_batch_*"), ("test", "test_batch")):
        batches = [pickle.loads(file.read_bytes(), encoding="bytes") for file in sorted(folder.glob(pattern))]
        parts[f"{part}_images"] = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32)
        parts[f"{part}_labels"] = np.concatenate([batch[b"labels"] for batch in batches])
    return parts


@dataclasses.dataclass
class Text:
    """Numbers of characters, the last tenth for the test; how many characters there are."""

    name: str
    train: torch.Tensor
    test: torch.Tensor
    characters: int


def text(folder: str | None) -> Text:
    """The first *shakespeare*.txt of a folder; the help on topics that comes with Python without one."""
    if folder is None:
        from pydoc_data.topics import topics

        name, content = "Python's help", "\n".join(topics[name] for name in sorted(topics))
    else:
        found = sorted(Path(folder).glob("*shakespeare*.txt"))
        if not found:
            raise SystemExit(f"--data {folder}: {_what_is(folder)}no *shakespeare*.txt")
        name, content = "tiny Shakespeare", found[0].read_text(encoding="utf-8")
    numbers = {character: number for number, character in enumerate(sorted(set(content)))}
    tokens = torch.tensor([numbers[character] for character in content])
    cut = len(tokens) * 9 // 10
    return Text(name, tokens[:cut], tokens[cut:], len(numbers))


# --- tasks


@dataclasses.dataclass
class Task:
    """What is learned.

    Attributes:
        name: Of the data, for the table.
        settings: What else makes it another task: a checkpoint of one is none of another.
        metric: The same, "accuracy %" or "loss".
        model: Makes it, with the seed set.
        epochs: How many.
        batches: Of this rank, in an epoch of a seed.
        loss: Of a batch.
        evaluate: Of the model: the metric, on all ranks.
        optimizer: Of a model and a spec: Horovod's, and its compression.
    """

    name: str
    settings: dict[str, Any]
    metric: str
    model: Callable[[], nn.Module]
    epochs: int
    batches: Callable[[int, int], list[Batch]]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    evaluate: Callable[[nn.Module], float]
    optimizer: Callable[[nn.Module, str], tuple[Any, Any]]


def classification(
    data: Images, model: Callable[[], nn.Module], epochs: int, lr: float, batch: int = 32, flip: bool = False
) -> Task:
    """Images, by SGD with momentum; the learning rate falls to nothing along a cosine."""
    inputs, labels = data.train

    def batches(seed: int, epoch: int) -> list[Batch]:
        random = np.random.default_rng([seed, epoch])
        order = random.permutation(len(labels))[hvd.rank() :: hvd.size()]
        order = order[: len(labels) // hvd.size() // batch * batch]
        flipped = np.random.default_rng([seed, epoch, hvd.rank()]).random(len(order)) < (0.5 if flip else 0)
        found = []
        for i in range(0, len(order), batch):
            x = inputs[order[i : i + batch]].clone()
            turned = torch.from_numpy(flipped[i : i + batch])
            x[turned] = x[turned].flip(-1)
            found.append((x, labels[order[i : i + batch]]))
        return found

    @torch.no_grad()
    def evaluate(model: nn.Module) -> float:
        x, y = (part[hvd.rank() :: hvd.size()] for part in data.test)
        correct = sum(int((model(x[i : i + 250]).argmax(1) == y[i : i + 250]).sum()) for i in range(0, len(y), 250))
        return 100 * hvd.allreduce(torch.tensor(correct), op=hvd.Sum, name="correct").item() / len(data.test[1])

    return Task(
        data.name,
        {"shape": list(inputs.shape), "lr": lr, "batch": batch, "flip": flip},
        "accuracy %",
        model,
        epochs,
        batches,
        lambda model, pair: F.cross_entropy(model(pair[0]), pair[1]),
        evaluate,
        lambda model, spec: sgd(model, spec, lr),
    )


def sgd(model: nn.Module, spec: str, lr: float) -> tuple[Any, Any]:
    """SGD with momentum on Horovod, and its compression."""
    compression = Compression.from_spec(spec, model.named_parameters(), seed=torch.initial_seed())
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=1e-4)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression), compression


def language(
    data: Text,
    model: Callable[[], nn.Module],
    epochs: int,
    optimizer: Callable[[nn.Module, str], tuple[Any, Any]],
    batch: int = 16,
    length: int = 64,
    steps: int = 100,
) -> Task:
    """The next character; an epoch is so many steps on random pieces of the text, the loss is in nats."""

    def pieces(random: np.random.Generator, tokens: torch.Tensor) -> Batch:
        starts = random.integers(len(tokens) - length - 1, size=(batch, 1))
        found = tokens[torch.from_numpy(starts + np.arange(length + 1))]
        return found[:, :-1], found[:, 1:]

    def batches(seed: int, epoch: int) -> list[Batch]:
        random = np.random.default_rng([seed, epoch, hvd.rank()])
        return [pieces(random, data.train) for _ in range(steps)]

    def loss(model: nn.Module, pair: Batch) -> torch.Tensor:
        return F.cross_entropy(model(pair[0]).flatten(0, 1), pair[1].flatten())

    @torch.no_grad()
    def evaluate(model: nn.Module) -> float:
        random = np.random.default_rng([1, hvd.rank()])
        losses = torch.stack([loss(model, pieces(random, data.test)) for _ in range(40)])
        return float(hvd.allreduce(losses.mean(), name="test loss"))

    settings = {"tokens": len(data.train), "batch": batch, "length": length, "steps": steps}
    return Task(data.name, settings, "loss", model, epochs, batches, loss, evaluate, optimizer)


# --- training


@dataclasses.dataclass
class Progress:
    """How far a training is; what it has sent, in bytes, by kind of layer and in all."""

    epoch: int = 0
    steps: int = 0
    seconds: float = 0.0
    curve: list[float] = dataclasses.field(default_factory=list)
    dense: dict[str, float] = dataclasses.field(default_factory=dict)
    sent: dict[str, float] = dataclasses.field(default_factory=dict)


class Training:
    """Of a task with a spec and a seed; what it has done it keeps in a folder, and goes on from there."""

    def __init__(self, title: str, task: Task, spec: str, seed: int, out: Path) -> None:
        self._task, self._spec, self._seed = task, spec, seed
        self._name = in_file_name(f"{title}-{spec}-{seed}")
        self._out = out
        torch.manual_seed(seed)
        self._model = task.model()
        self._optimizer, self._compression = task.optimizer(self._model, spec)
        for group in self._optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        kinds: dict[int, str] = {}
        for module in self._model.modules():  # an attention is there before the layers in it
            for kind in [kind for cls, kind in KINDS.items() if isinstance(module, cls)]:
                kinds = {**{id(p): kind for p in module.parameters()}, **kinds}
        self._kinds = {name: kinds.get(id(p), "other") for name, p in self._model.named_parameters()}
        self.progress = Progress()

    def run(self) -> dict[str, Any]:
        """Trains to the end; returns the row of the table."""
        hvd.broadcast_parameters(self._model.state_dict(), root_rank=0)
        self._resume()
        task, progress = self._task, self.progress
        schedule = self._schedule()
        steps = len(task.batches(self._seed, 0))
        with tqdm(total=task.epochs * steps, initial=progress.steps, desc=self._name, disable=hvd.rank() > 0) as bar:
            while progress.epoch < task.epochs:
                self._train(schedule, bar)
                progress.curve.append(self._evaluate())
                progress.epoch += 1
                self._save()
        ratios = {kind: progress.dense[kind] / progress.sent[kind] for kind in progress.sent if progress.sent[kind]}
        return {
            "spec": self._spec,
            "seed": self._seed,
            "metric": task.metric,
            "value": progress.curve[-1],
            "curve": progress.curve,
            "steps": progress.steps,
            "ratios": ratios,
            "minutes": progress.seconds / 60,
        }

    def _train(self, schedule: Callable[[], None], bar: tqdm) -> None:
        start = time.perf_counter()
        for batch in self._task.batches(self._seed, self.progress.epoch):
            schedule()
            self._optimizer.zero_grad()
            loss = self._task.loss(self._model, batch)
            loss.backward()
            self._optimizer.step()
            self.progress.steps += 1
            self._count()
            bar.set_postfix_str(f"loss {loss.item():.3f}, {self._compression.stats.step.ratio:.1f}x", refresh=False)
            bar.update()
        self.progress.seconds += time.perf_counter() - start

    def _evaluate(self) -> float:
        """What normalization has seen is averaged over the ranks, so that all have one model."""
        for name, buffer in self._model.named_buffers():
            if buffer.is_floating_point():
                hvd.allreduce_(buffer, name=f"buffer.{name}")
        self._model.eval()
        value = self._task.evaluate(self._model)
        self._model.train()
        return value

    def _count(self) -> None:
        """Adds what the last step has sent."""
        step, progress = self._compression.stats.step, self.progress
        for name, counters in step.parameters.items():
            if counters.encoded:
                kind = self._kinds[name]
                numel = self._model.get_parameter(name).numel()
                progress.dense[kind] = progress.dense.get(kind, 0) + 4 * numel
                progress.sent[kind] = progress.sent.get(kind, 0) + counters.payload_bytes
        progress.dense["all"] = progress.dense.get("all", 0) + step.bytes_dense
        progress.sent["all"] = progress.sent.get("all", 0) + step.bytes_sent

    def _schedule(self) -> Callable[[], None]:
        """Sets the learning rate for a step: up in the first twentieth, then down along a cosine."""
        total = self._task.epochs * len(self._task.batches(self._seed, 0))

        def set_rate() -> None:
            at = self.progress.steps / total
            factor = min(1.0, 20 * (at + 1 / total)) * 0.5 * (1 + math.cos(math.pi * at))
            for group in self._optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor

        return set_rate

    # A checkpoint is a file of each rank; a run that was killed goes on from the last epoch that all ranks have.

    def _file(self, epoch: int) -> Path:
        return self._out / f"{self._name}.epoch{epoch}.rank{hvd.rank()}of{hvd.size()}.pt"

    def _save(self) -> None:
        epoch = self.progress.epoch
        state = {
            "of": self._of(),
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "compression": self._compression.state_dict(),
            "progress": dataclasses.asdict(self.progress),
        }
        part = self._file(epoch).with_suffix(".part")
        torch.save(state, part)
        part.rename(self._file(epoch))
        self._file(epoch - 2).unlink(missing_ok=True)

    def _of(self) -> dict[str, Any]:
        """What a checkpoint belongs to."""
        task = self._task
        shapes = [[name, list(p.shape)] for name, p in self._model.named_parameters()]
        return {"data": task.name, "epochs": task.epochs, "spec": self._spec, "model": shapes, **task.settings}

    def _resume(self) -> None:
        own = {epoch for epoch in range(1, self._task.epochs + 1) if self._file(epoch).exists()}
        common = set.intersection(*hvd.allgather_object(own))
        if not common:
            return
        state = torch.load(self._file(max(common)), weights_only=False)
        if state["of"] != self._of():
            changed = [key for key, value in self._of().items() if state["of"].get(key) != value]
            raise SystemExit(
                f"{self._file(max(common))} is of another training (other {', '.join(changed)}): choose another --out"
            )
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._compression.load_state_dict(state["compression"])
        self.progress = Progress(**state["progress"])


def run(tasks: dict[str, Callable[[], Task]], args: argparse.Namespace) -> None:
    """Trains each task that was asked for with each codec and seed; rank 0 prints the table, and writes it as JSON too."""
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    chosen = [name for name in tasks if args.task is None or name in args.task]
    made = {name: tasks[name]() for name in chosen}  # all at once: data that is not there is found now
    for title in chosen:
        task = made[title]
        for spec in args.codec:
            for seed in args.seed:
                row = Training(title + (" full" if args.full else ""), task, spec, seed, out).run()
                rows.append({"task": title, "full": args.full, "data": task.name, **row})
    if hvd.rank() == 0:
        name = in_file_name("-".join([*chosen, *args.name]))
        (out / f"{name}.json").write_text(json.dumps(rows, indent=1))
        print(table(rows))


def in_file_name(text: str) -> str:
    return re.sub(r"[^\w.=-]+", "_", text)


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown: how many times fewer bytes than a float32 gradient the payloads of a kind of layer have, where something was
    encoded, and how many times fewer a rank has sent, small and dense parameters included.
    """  # noqa: D205
    kinds = [kind for kind in [*KINDS.values(), "other"] if any(kind in row["ratios"] for row in rows)]
    heads = " | ".join([*(f"{kind}: payload" for kind in kinds), "on the wire"])
    lines = [
        f"| task | data | codec | seed | result | {heads} | steps | minutes |",
        "|" + "---|" * (8 + len(kinds)),
    ]
    for row in rows:
        ratios = " | ".join(f"{row['ratios'][kind]:.1f}" if kind in row["ratios"] else "" for kind in [*kinds, "all"])
        value = f"{row['value']:.2f} %" if row["metric"].endswith("%") else f"{row['value']:.3f}"
        lines.append(
            f"| {row['task']} | {row['data']} | `{row['spec']}` | {row['seed']} | {value} | {ratios} | {row['steps']} "
            f"| {row['minutes']:.1f} |"
        )
    return "\n".join(lines)
