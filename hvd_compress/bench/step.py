"""Times whole training steps on gradients of a model's shapes: dense, fp16, bf16 and compressed ones, in one run.

Run it on several hosts, or on a cluster on this machine::

    python -m hvd_compress.bench cluster --hosts 4 --rate 1gbit -- step --model resnet50 --codec all --json rows.json

A step is PyTorch's and Horovod's own: autograd's backward, which produces random gradients in the order of the model's, the
hooks of `hvd.DistributedOptimizer`, and SGD. `--compute-ms` replays an accelerator that computes for so long, a third of it in
the forward pass; what the host does meanwhile does not make it longer. Without, there is no compute.

Each repetition takes a step of every row, one after the other; a row is the median over the repetitions of the slowest rank's
time. "exposed" is what passes between the last gradient and the moment when all have been exchanged. Bytes are what a rank
sends, the mean over the ranks: by stats ("sent"; of Horovod's own allreduce and of DDP's what a ring sends), and by the network
card's counter where the card is known (`--card eth0`, or the cluster's), divided among the ranks of a host; "headers" are what
of it is Ethernet's, IP's and TCP's. "bound" is the time that the sent bytes take at the bandwidth that an allgather was
measured to have in this run, "ratio" how many times fewer bytes than dense, "speedup" how many times faster than "none".

`--ddp` adds PyTorch's own DistributedDataParallel over Gloo, dense and with its fp16 hook. Every row keeps its own residuals
and buffers: some 80 bytes a parameter of the model with `--codec all`, on each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

from hvd_compress.bench.models import DENSE, MODELS, RIVALS
from hvd_compress.bench.network import CARD, bandwidth, bytes_of_card, headers_of_card, rate_of_cards
from hvd_compress.codecs import CODECS, parse

WARM_UP = 3
SETTLED = 100  # steps after which a residual has grown to about what it usually is, and the network is measured
SHIFTS = 1 << 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--model", choices=MODELS, default="resnet50", help="whose gradients (default: %(default)s)")
    parser.add_argument(
        "--codec", action="append", metavar="SPEC", help="may be repeated; all: every codec as it is by default (default: all)"
    )
    parser.add_argument("--compute-ms", type=float, default=0, metavar="MS", help="forward and backward (default: none)")
    parser.add_argument("--exchange", default="auto", help="allgather, scatter-gather or auto (default: %(default)s)")
    parser.add_argument("--bucket-bytes", type=int, metavar="N", help="default: that of the compression")
    parser.add_argument("--repetitions", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--ddp", action="store_true", help="also PyTorch's DistributedDataParallel over Gloo")
    parser.add_argument("--card", metavar="NAME", default=os.environ.get(CARD), help="network card whose counter is read")
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON; - is standard output")


def run(arguments: argparse.Namespace) -> None:
    """Runs the benchmark; rank 0 prints its table."""
    import horovod.torch as hvd

    specs = _specs(arguments)
    # Horovod remembers so many tensors. It is all rows' here, which take turns; in a training there is but one.
    tensors = len(MODELS[arguments.model]()) * len(specs)
    os.environ["HOROVOD_CACHE_CAPACITY"] = str(max(1024, 4 * tensors))
    hvd.init()
    torch.set_num_threads(1)
    bytes_of_card(arguments.card)  # whether it is there
    if arguments.ddp:
        _init_gloo(arguments.card)
    speed = bandwidth()
    work = _Work(arguments.model, arguments.compute_ms / 1e3, hvd.rank())
    try:
        rows: dict[str, _Row] = {"local": _Local(work)}
        rows |= {spec: _Horovod(work, spec, arguments) for spec in specs}
    except ValueError as error:
        raise SystemExit(f"step: {error}") from None
    if arguments.ddp:
        rows |= {name: _DDP(work, name) for name in RIVALS}
    for row in rows.values():
        for _ in range(row.warm_up):
            row.step()
            row.clear()
    for _ in range(arguments.repetitions):
        for row in rows.values():
            hvd.barrier()
            bytes_before, headers_before = bytes_of_card(arguments.card), headers_of_card(arguments.card)
            row.take()
            hvd.barrier()  # so that all that it sends is sent
            row.taken[-1]["bytes_card"] = (bytes_of_card(arguments.card) - bytes_before) / hvd.local_size()
            row.taken[-1]["bytes_headers"] = (headers_of_card(arguments.card) - headers_before) / hvd.local_size()
            row.clear()
    figures = {name: row.figures() for name, row in rows.items()}
    if arguments.ddp:
        torch.distributed.destroy_process_group()
    if hvd.rank() == 0:
        _show(_table(figures, work, speed, arguments), arguments)


def _specs(arguments: argparse.Namespace) -> list[str]:
    """Dense ones first, each once; SystemExit where an option is not allowed."""
    if arguments.repetitions < 1:
        raise SystemExit(f"--repetitions {arguments.repetitions} is not allowed; allowed is a whole number from 1 on")
    if not 0 <= arguments.compute_ms < 1e6:
        raise SystemExit(f"--compute-ms {arguments.compute_ms} is not allowed; allowed is a number from 0 to 1e6")
    if arguments.json and arguments.json != "-":
        folder = Path(arguments.json).resolve().parent
        if Path(arguments.json).is_dir() or not os.access(folder, os.W_OK):  # now, and not after all was measured
            raise SystemExit(f"--json {arguments.json} cannot be written; allowed is a file in a folder that is there")
    specs = [*DENSE]
    for spec in arguments.codec or ["all"]:
        specs += CODECS if spec == "all" else [spec]
    try:
        for spec in specs:
            parse(spec)
    except ValueError as error:
        raise SystemExit(f"--codec: {error}") from None
    return list(dict.fromkeys(specs))


# --- what a step is


class _Work:
    """Gradients, and how long computing them takes.

    Attributes:
        shapes: Of the parameters, by name.
        numel: Of all of them.
        data: What the parameters of all rows share.
        last: When the last gradient of a backward was produced.
    """

    def __init__(self, model: str, seconds: float, rank: int) -> None:
        self.shapes = dict(MODELS[model]())
        generator = torch.Generator().manual_seed(rank)
        self.data = [torch.zeros(shape) for shape in self.shapes.values()]
        self.numel = sum(data.numel() for data in self.data)
        self._noise = torch.randn(self.numel + SHIFTS, generator=generator)  # another part of it in every step
        self._step = 0
        self.last = 0.0
        self._forward, self._backward = seconds / 3, seconds * 2 / 3
        self._begun = 0.0
        sizes = [data.numel() for data in self.data]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]

    def parameters(self) -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(data) for data in self.data]

    def loss(self, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        time.sleep(self._forward)
        x = torch.zeros(())
        for i, parameter in enumerate(parameters):
            x = _Layer.apply(x, parameter, self, i)  # type: ignore[no-untyped-call]
        self._step += 1
        self._begun = time.perf_counter()
        return x

    def produce(self, i: int) -> torch.Tensor:
        """The gradient of a parameter, at its time in the backward pass."""
        start = self._starts[i]
        rest = self._begun + self._backward * (1 - start / self.numel) - time.perf_counter()
        if self._backward > 0 and rest > 0:
            time.sleep(rest)
        if i == 0:
            self.last = time.perf_counter()
        start += self._step * 9973 % SHIFTS
        # A copy: it becomes the parameter's gradient, in which the result will be.
        return self._noise[start : start + self.data[i].numel()].view(self.data[i].shape).clone()


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: torch.Tensor, work: _Work, i: int) -> torch.Tensor:
        ctx.work, ctx.i = work, i
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], ctx.work.produce(ctx.i), None, None


class _Row(ABC):
    """One way of training.

    Attributes:
        taken: The figures of each step.
        warm_up: Steps that do not count.
    """

    warm_up = 1

    def __init__(self, work: _Work) -> None:
        self.work = work
        self.parameters = work.parameters()
        self.taken: list[dict[str, float]] = []

    def take(self) -> None:
        """Takes a step that counts."""
        start = time.perf_counter()
        exchanged = self.step()
        end = time.perf_counter()
        self.taken.append({"step_s": end - start, "exposed_s": max(exchanged - self.work.last, 0.0), **self.sent()})

    def clear(self) -> None:
        """Gives the memory of the gradients back, as zero_grad() does: other rows need it."""
        for parameter in self.parameters:
            parameter.grad = None

    @abstractmethod
    def step(self) -> float:
        """Takes a step; returns when all gradients had been exchanged."""

    @abstractmethod
    def sent(self) -> dict[str, float]:
        """What stats say of the step."""

    def figures(self) -> dict[str, float]:
        """Over the ranks the slowest, or of bytes the mean; of that the median."""
        import horovod.torch as hvd

        of_ranks = hvd.allgather_object(self.taken)
        over_ranks: dict[str, list[float]] = {}
        for taken in zip(*of_ranks, strict=True):
            for key in taken[0]:
                values = [each[key] for each in taken]
                over_ranks.setdefault(key, []).append(statistics.mean(values) if key.startswith("bytes") else max(values))
        return {key: statistics.median(values) for key, values in over_ranks.items()}


class _Local(_Row):
    """Each rank for itself: what is left when nothing is exchanged."""

    def __init__(self, work: _Work) -> None:
        super().__init__(work)
        self._optimizer = torch.optim.SGD(self.parameters, lr=1e-6)

    def step(self) -> float:
        torch.autograd.backward(self.work.loss(self.parameters))
        self._optimizer.step()
        return self.work.last

    def sent(self) -> dict[str, float]:
        return {"bytes_sent": 0}


class _Horovod(_Row):
    def __init__(self, work: _Work, spec: str, arguments: argparse.Namespace) -> None:
        import horovod.torch as hvd

        from hvd_compress.torch import Compression

        super().__init__(work)
        named = [(f"{spec}.{name}", p) for name, p in zip(work.shapes, self.parameters, strict=True)]
        self._stats = None
        if spec in ("none", "fp16"):  # Horovod's own, as it is without us
            self._element_bytes = 4 if spec == "none" else 2
            compression = getattr(hvd.Compression, spec)
        else:
            options: dict[str, Any] = {"exchange": arguments.exchange}
            if arguments.bucket_bytes is not None:
                options["bucket_bytes"] = arguments.bucket_bytes
            compression = Compression.from_spec(spec, named, **options)
            codec = parse(spec)
            self.warm_up = SETTLED if codec.has_residual or codec.is_measured else WARM_UP
            self._stats = compression.stats
        self._optimizer = hvd.DistributedOptimizer(torch.optim.SGD(self.parameters, lr=1e-6), named, compression)

    def step(self) -> float:
        torch.autograd.backward(self.work.loss(self.parameters))
        self._optimizer.synchronize()
        exchanged = time.perf_counter()
        with self._optimizer.skip_synchronize():
            self._optimizer.step()
        return exchanged

    def sent(self) -> dict[str, float]:
        if self._stats is None:
            return {"bytes_sent": _ring(self._element_bytes * self.work.numel)}
        step = self._stats.step
        return {"bytes_sent": step.bytes_sent, "encode_s": step.encode_s, "decode_s": step.decode_s}


class _DDP(_Row):
    """PyTorch's DistributedDataParallel over Gloo; its buckets are made anew after the first step."""

    warm_up = 2

    def __init__(self, work: _Work, name: str) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        super().__init__(work)
        module = torch.nn.Module()
        for i, parameter in enumerate(self.parameters):
            module.register_parameter(str(i), parameter)
        module.forward = lambda: work.loss(self.parameters)
        self._model = torch.nn.parallel.DistributedDataParallel(module, init_sync=False, gradient_as_bucket_view=True)
        if name == "ddp:fp16":
            self._model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        self._element_bytes = 2 if name == "ddp:fp16" else 4
        self._optimizer = torch.optim.SGD(self.parameters, lr=1e-6)

    def step(self) -> float:
        torch.autograd.backward(self._model())
        exchanged = time.perf_counter()
        self._optimizer.step()
        return exchanged

    def sent(self) -> dict[str, float]:
        return {"bytes_sent": _ring(self._element_bytes * self.work.numel)}


def _ring(count: int) -> float:
    import horovod.torch as hvd

    return float(2 * (hvd.size() - 1) / hvd.size() * count)


def _init_gloo(card: str | None) -> None:
    """Lets PyTorch's own ranks find each other, over that card."""
    import horovod.torch as hvd
    import psutil  # type: ignore[import-untyped]  # which Horovod needs

    if card:
        os.environ["GLOO_SOCKET_IFNAME"] = card
        address = next((a.address for a in psutil.net_if_addrs()[card] if a.family == socket.AF_INET), "")
    else:
        address = "127.0.0.1" if hvd.local_size() == hvd.size() else socket.gethostbyname(socket.gethostname())
    if not address or (address.startswith("127.") and hvd.local_size() < hvd.size()):
        raise SystemExit(
            f"--ddp: the address {address!r} of this host is of no use to others; --card names the card they reach"
        )
    with socket.socket() as probe:
        probe.bind((address, 0))
        where = hvd.broadcast_object((address, probe.getsockname()[1]))
    torch.distributed.init_process_group("gloo", f"tcp://{where[0]}:{where[1]}", rank=hvd.rank(), world_size=hvd.size())


# --- what is shown


def _table(
    figures: dict[str, dict[str, float]], work: _Work, speed: float | None, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each codec."""
    import horovod.torch as hvd

    local = figures.pop("local")
    return [
        {
            "codec": name,
            "model": arguments.model,
            "elements": work.numel,
            "compute_s": arguments.compute_ms / 1e3,
            "hosts": hvd.cross_size(),
            "ranks": hvd.size(),
            "exchange": arguments.exchange,
            "bucket_bytes": arguments.bucket_bytes,
            "repetitions": arguments.repetitions,
            "rate": rate_of_cards(),
            "bandwidth": speed,
            "local_s": local["step_s"],
            "step_s": of["step_s"],
            "exposed_s": of["exposed_s"],
            "encode_s": of.get("encode_s", 0.0),
            "decode_s": of.get("decode_s", 0.0),
            "bytes_dense": _ring(4 * work.numel),
            "bytes_sent": of["bytes_sent"],
            "bytes_card": of["bytes_card"] if arguments.card else None,
            "bytes_headers": of["bytes_headers"] if arguments.card else None,
            "bound_s": of["bytes_sent"] / speed if speed else 0.0,
            "ratio": _ring(4 * work.numel) / of["bytes_sent"] if of["bytes_sent"] else 1.0,
            "speedup": figures["none"]["step_s"] / of["step_s"],
        }
        for name, of in figures.items()
    ]


def _show(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    out = sys.stderr if arguments.json == "-" else sys.stdout
    first = rows[0]
    measured = f"{first['bandwidth'] / 1e6:.1f} MB/s" if first["bandwidth"] else "nothing"
    print(
        f"{first['model']}, {first['elements']} parameters, {first['ranks']} ranks on {first['hosts']} hosts, rate "
        f"{first['rate'] or 'not limited'}, measured {measured}; a step without exchange {first['local_s'] * 1e3:.1f} ms",
        file=out,
    )
    heads = ("step ms", "exposed", "encode", "decode", "bound", "MB sent", "by card", "headers", "ratio", "speedup")
    print(f"{'codec':28}" + "".join(f"{head:>10}" for head in heads), file=out)
    for row in rows:
        times = "".join(f"{row[key] * 1e3:10.1f}" for key in ("step_s", "exposed_s", "encode_s", "decode_s", "bound_s"))
        sent = f"{row['bytes_sent'] / 1e6:10.3f}"
        counted = (row["bytes_card"], row["bytes_headers"])
        card = "".join(f"{'-':>10}" if count is None else f"{count / 1e6:10.3f}" for count in counted)
        print(f"{row['codec']:28}{times}{sent}{card}{row['ratio']:10.1f}{row['speedup']:10.2f}", file=out)
    if arguments.json == "-":
        json.dump(rows, sys.stdout, indent=1)
        print()
    elif arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1))
