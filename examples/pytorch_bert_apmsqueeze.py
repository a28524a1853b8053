"""Trains the same small BERT with Adam and with APMSqueeze, and shows what each sends and how well it learns.

Masked language modelling on characters. Run it on two processes of this machine, which takes a few minutes::

    horovodrun -np 2 python examples/pytorch_bert_apmsqueeze.py --plot bert.png

or on a text of your own::

    horovodrun -np 2 python examples/pytorch_bert_apmsqueeze.py --data shakespeare.txt --steps 2000

All that a training script which uses Horovod has to change: `APMSqueeze` instead of Adam, and, in `hvd.DistributedOptimizer`,
``compression=optimizer.compression``.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from hvd_compress.torch import APMSqueeze, Compression

OPTIMIZERS = ["adam", "apmsqueeze"]
MASKED = 0.15  # of the characters
EVALUATED = 64  # batches


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", action="append", choices=OPTIMIZERS, help="may be repeated; default: both")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--freeze", type=float, default=0.15, help="fraction of steps before it freezes (default: %(default)s)")
    parser.add_argument("--codec", default="l2", metavar="SPEC", help="of APMSqueeze (default: %(default)s: one bit)")
    parser.add_argument("--batch-size", type=int, default=16, help="of each process (default: %(default)s)")
    parser.add_argument("--length", type=int, default=64, help="characters of a sequence (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument(
        "--beta2",
        type=float,
        default=0.98,
        help="decay of the second moment, which needs several times 1 / (1 - beta2) steps to settle (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", metavar="TXT", help="a text; default: the help on topics that comes with Python")
    parser.add_argument("--plot", metavar="PNG", help="draw the loss against bytes sent")
    parser.add_argument("--json", metavar="FILE", help="write the results")
    return parser.parse_args()


def load_data(path: str | None) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The text as numbers of characters, its last tenth apart, and how many characters there are. 0 is the mask."""
    if path is None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
    else:
        text = Path(path).read_text(encoding="utf-8")
    numbers = {character: number for number, character in enumerate(sorted(set(text)), start=1)}
    tokens = torch.tensor([numbers[character] for character in text])
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:], len(numbers) + 1


class Bert(nn.Module):
    """Half a million weights by default."""

    def __init__(self, characters: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(characters, width)
        self.place = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, characters)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1])
        return self.head(self.encoder(self.token(tokens) + self.place(places)))


def batches(text: torch.Tensor, args: argparse.Namespace, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random pieces of the text with some characters masked, and their labels, -100 where nothing was masked."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - args.length, (args.batch_size, 1), generator=generator)
        labels = text[starts + torch.arange(args.length)]
        masked = torch.rand(labels.shape, generator=generator) < MASKED
        yield labels.masked_fill(masked, 0), labels.masked_fill(~masked, -100)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    tokens, labels = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, text: torch.Tensor, args: argparse.Namespace) -> float:
    """Loss on text that was not trained on, in nats a character; each process takes its share of the batches."""
    model.eval()
    mine = itertools.islice(batches(text, args, seed=1), hvd.rank(), EVALUATED, hvd.size())
    total = torch.tensor([(loss.item(), 1.0) for loss in (loss_of(model, batch) for batch in mine)]).sum(0)
    model.train()
    total = hvd.allreduce(total, op=hvd.Sum, name="evaluation")
    return float(total[0] / total[1])


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """What APMSqueeze is to leave to the full Adam: embeddings, whose rows have gradients now and then only, and norms."""
    whole = {
        f"{name}.{own}"
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.LayerNorm))
        for own, _ in module.named_parameters(recurse=False)
    }
    named = list(model.named_parameters())
    return [
        {"params": [(name, p) for name, p in named if name not in whole]},
        {"params": [(name, p) for name, p in named if name in whole], "freeze": False},
    ]


def make_optimizer(which: str, model: nn.Module, args: argparse.Namespace) -> tuple[Any, Any]:
    """Horovod's optimizer, and the compression that it has."""
    if which == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, args.beta2))
        compression = Compression.none(model.named_parameters())
    else:
        optimizer = APMSqueeze(
            parameter_groups(model),
            lr=args.lr,
            betas=(0.9, args.beta2),
            freeze_step=args.freeze,
            total_steps=args.steps,
            codec=args.codec,
        )
        compression = optimizer.compression
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression), compression


def train(
    which: str, args: argparse.Namespace, text: torch.Tensor, other: torch.Tensor, characters: int, bar: tqdm
) -> dict[str, Any]:
    """Trains from the same start with one optimizer; returns its row of the table and its line of the plot."""
    torch.manual_seed(args.seed)
    model = Bert(characters, args.length, args.width, args.layers)
    optimizer, compression = make_optimizer(which, model, args)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 40) * (1 - step / args.steps))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data = batches(text, args, seed=1000 * args.seed + hvd.rank() + 2)
    curve, start = [], time.perf_counter()
    for step in range(args.steps):
        optimizer.zero_grad()
        loss_of(model, next(data)).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        schedule.step()
        bar.update()
        if (step + 1) % max(1, args.steps // 10) == 0:
            curve.append((compression.stats.total.bytes_sent, evaluate(model, other, args)))
            bar.set_postfix(optimizer=which, loss=f"{curve[-1][1]:.3f}")
    return {
        "optimizer": which,
        "loss": curve[-1][1],
        "bytes_sent": compression.stats.total.bytes_sent,
        "ratio": compression.stats.total.ratio,
        "ratio_last_step": compression.stats.step.ratio,
        "seconds": time.perf_counter() - start,
        "curve": curve,
    }


def show(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'optimizer':12} {'loss':>8} {'MB sent':>9} {'ratio':>7} {'at the end':>11} {'seconds':>8}")
    for row in rows:
        print(
            f"{row['optimizer']:12} {row['loss']:8.4f} {row['bytes_sent'] / 1e6:9.1f} {row['ratio']:7.1f} "
            f"{row['ratio_last_step']:11.1f} {row['seconds']:8.1f}"
        )


def plot(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(6, 4))
    for row in rows:
        sent, losses = zip(*row["curve"], strict=True)
        axes.plot([each / 1e6 for each in sent], losses, marker="o", label=row["optimizer"])
    axes.set(xscale="log", xlabel="MB sent by each process", ylabel="loss (nats a character)")
    axes.legend()
    plt.savefig(path, bbox_inches="tight", dpi=120)


def main() -> None:
    args = parse_args()
    hvd.init()
    torch.set_num_threads(1)
    text, other, characters = load_data(args.data)
    which = args.optimizer or OPTIMIZERS
    with tqdm(total=args.steps * len(which), disable=hvd.rank() != 0, unit="step") as bar:
        rows = [train(each, args, text, other, characters, bar) for each in which]
    if hvd.rank() == 0:
        show(rows)
        if args.plot:
            plot(rows, args.plot)
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
