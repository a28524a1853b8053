"""Times the whole way of one gradient through Horovod, dense and compressed, in one run: encode, exchange, decode.

Run it on several hosts, or on a cluster on this machine::

    python -m hvd_compress.bench cluster --hosts 4 --rate 1gbit -- exchange --elements 25000000 --codec onebit

Each repetition takes every row once, one after the other; a row is the median over the repetitions of the slowest rank's time.
Bytes are what a rank sends, the mean over ranks: by stats, and by the network card's counter where the card is known
(`--card eth0`, or the cluster's).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hvd_compress.bench.network import CARD, bytes_of_card, rate_of_cards
from hvd_compress.codecs import parse
from hvd_compress.options import check_bucket_bytes, check_exchange


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--elements", type=int, default=25_000_000, help="floats of the gradient (default: %(default)s)")
    parser.add_argument("--tensors", type=int, default=1, help="which it is in, of one size (default: %(default)s)")
    parser.add_argument("--codec", action="append", metavar="SPEC", help="may be repeated (default: onebit)")
    parser.add_argument("--exchange", default="auto", help="allgather, scatter-gather or auto (default: %(default)s)")
    parser.add_argument("--bucket-bytes", type=int, metavar="N", help="default: that of the compression")
    parser.add_argument("--repetitions", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--card", metavar="NAME", default=os.environ.get(CARD), help="network card whose counter is read")
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON; - is standard output")


def run(arguments: argparse.Namespace) -> None:
    """Runs the benchmark; rank 0 prints its table."""
    import horovod.torch as hvd

    from hvd_compress.torch import Compression

    _check(arguments)
    hvd.init()
    torch.set_num_threads(1)
    sizes = [arguments.elements // arguments.tensors] * arguments.tensors
    parameters = [torch.nn.Parameter(torch.empty(n, 1)) for n in sizes]
    gradients = [torch.randn(n, 1, generator=torch.Generator().manual_seed(hvd.rank())) for n in sizes]
    options = {} if arguments.bucket_bytes is None else {"bucket_bytes": arguments.bucket_bytes}
    compressions: dict[str, Any] = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}
    for spec in arguments.codec or ["onebit"]:
        named = [(f"p{i}", p) for i, p in enumerate(parameters)]
        compressions[spec] = Compression.from_spec(spec, named, min_numel=0, exchange=arguments.exchange, **options)
    seconds: dict[str, list[float]] = {name: [] for name in compressions}
    spent: dict[str, list[float]] = {name: [] for name in compressions}
    for repetition in range(arguments.repetitions + 1):  # the first one does not count
        for name, compression in compressions.items():
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient.clone()
            hvd.barrier()
            before, start = bytes_of_card(arguments.card), time.perf_counter()
            _reduce(name, parameters, compression)
            elapsed = time.perf_counter() - start
            hvd.barrier()  # so that all that it sends is sent
            bytes_sent = bytes_of_card(arguments.card) - before
            if repetition > 0:
                seconds[name].append(max(hvd.allgather_object(elapsed)))
                spent[name].append(statistics.mean(hvd.allgather_object(bytes_sent)))
    rows = [_row(name, seconds, spent, compressions[name], arguments, hvd.size()) for name in compressions]
    if hvd.rank() == 0:
        _show(rows, arguments)


def _check(arguments: argparse.Namespace) -> None:
    for option in ("elements", "tensors", "repetitions"):
        if getattr(arguments, option) < 1:
            raise SystemExit(f"--{option} {getattr(arguments, option)} is not allowed; allowed is a whole number from 1 on")
    if arguments.elements % arguments.tensors != 0:
        raise SystemExit(f"--elements {arguments.elements} cannot be divided into --tensors {arguments.tensors} of one size")
    try:
        for spec in arguments.codec or []:
            parse(spec)
        check_exchange(arguments.exchange)
        if arguments.bucket_bytes is not None:
            check_bucket_bytes(arguments.bucket_bytes)
    except ValueError as error:
        raise SystemExit(f"exchange: {error}") from None


def _reduce(name: str, parameters: list[torch.nn.Parameter], compression: Any) -> None:
    """What Horovod's optimizer does."""
    import horovod.torch as hvd

    handles = []
    for number, p in reversed(list(enumerate(parameters))):
        tensor, context = compression.compress(p.grad)
        handles.append((hvd.allreduce_async_(tensor, name=f"{name}.{number}"), p, context))
    for handle, p, context in handles:
        p.grad = compression.decompress(hvd.synchronize(handle), context)


def _row(
    name: str, seconds: dict[str, list[float]], spent: dict[str, list[float]], compression: Any, arguments: Any, hosts: int
) -> dict[str, Any]:
    step = statistics.median(seconds[name])
    stats = getattr(compression, "stats", None)
    record = stats and stats.step
    network = stats.network if stats else None
    return {
        "codec": name,
        "exchange": "/".join(sorted(record.exchanges)) if record else "allreduce",
        "hosts": hosts,
        "rate": rate_of_cards(),
        "elements": arguments.elements,
        "step_s": step,
        "encode_s": record.encode_s if record else 0.0,
        "decode_s": record.decode_s if record else 0.0,
        "bytes_dense": 4 * arguments.elements,
        "bytes_sent": record.bytes_sent if record else None,
        "bytes_card": statistics.median(spent[name]) if arguments.card else None,
        "speedup": statistics.median(seconds["none"]) / step,
        "selected": record.selected if record else None,
        "latency_s": network.latency if network else None,
        "bandwidth": network.bandwidth if network else None,
    }


def _show(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    out = sys.stderr if arguments.json == "-" else sys.stdout
    first = rows[0]
    rate = first["rate"] or "not limited"
    print(f"{first['elements']} floats in {arguments.tensors} tensors, {first['hosts']} ranks, rate {rate}", file=out)
    print(
        f"{'codec':34}{'exchange':16}{'ms':>9}{'encode':>9}{'decode':>9}{'MB sent':>10}{'by card':>10}{'speedup':>9}", file=out
    )
    for row in rows:
        print(
            f"{row['codec']:34}{row['exchange']:16}{row['step_s'] * 1e3:9.1f}{row['encode_s'] * 1e3:9.1f}"
            f"{row['decode_s'] * 1e3:9.1f}{_mb(row['bytes_sent'])}{_mb(row['bytes_card'])}{row['speedup']:9.2f}",
            file=out,
        )
    for row in rows:
        if row["bandwidth"] is not None:
            print(
                f"{row['codec']}: an exchange was measured to take {row['latency_s'] * 1e3:.2f} ms and a second for "
                f"{row['bandwidth'] / 1e6:.2f} MB; {row['selected']} elements were sent last",
                file=out,
            )
    if arguments.json == "-":
        json.dump(rows, sys.stdout, indent=1)
        print()
    elif arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1))


def _mb(count: float | None) -> str:
    return f"{'-':>10}" if count is None else f"{count / 1e6:10.3f}"
