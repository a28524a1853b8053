"""Times encode and decode of every codec on one thread, beside the triad.

The triad, ``torch.add(a, b, out=c)`` over as many float32, is what memory allows: the yardstick. It is measured before every
single encode and decode, so that ratios hold on a noisy machine; all figures are medians. Codecs with a residual are brought
to their steady state first: a fresh gradient every step, plus a fixed mean of a twentieth of its size. The naive rows do the
same with a chain of torch operations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from hvd_compress.codecs import Codec, parse
from hvd_compress.vector import Vector

DEFAULT_CODECS = [
    "none",
    "fp16",
    "bf16",
    "adacomp:bin=50",
    "adacomp:bin=500",
    *(f"{name}:bits=4" for name in ("qsgd", "qsgdinf", "nuqsgd")),
    "qsgd:bits=4,coding=elias",
    "nuqsgd:bits=3,bucket=4096,coding=elias",
    "onebit:scale=l1",
    "onebit:scale=l2",
    "topk:fraction=0.01",
    "randomk:fraction=0.01",
    *(f"cat:scheme={scheme},cost=time,latency=0.001,bandwidth=1.25e8" for scheme in ("topk", "topk+sign", "stochastic")),
]
WARM_UP = 150
REPETITIONS = 9


class Timed(NamedTuple):
    """One row: medians in seconds, and the payload in bytes."""

    triad_s: float
    encode_s: float
    decode_s: float
    payload_bytes: int


class Gradients:
    """Fresh gradients without the cost of drawing them: a window into a pool of random numbers, moved every step."""

    def __init__(self, data: str, elements: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._slack = max(1000, elements // 8)
        self._pool = torch.empty(elements + self._slack)
        if data == "gaussian":
            self._pool.normal_(generator=generator)
        else:  # Laplace of variance 1: the difference of two exponential variables
            self._pool.exponential_(generator=generator)
            self._pool.sub_(torch.empty_like(self._pool).exponential_(generator=generator)).mul_(0.5**0.5)
        self._mean = torch.empty(elements).normal_(generator=generator).mul_(0.05)
        self._generator = generator
        self.current = torch.empty(elements)

    def next(self) -> torch.Tensor:
        """The next gradient, always in the same memory."""
        start = int(torch.randint(self._slack, (), generator=self._generator))
        return torch.add(self._pool[start : start + self.current.numel()], self._mean, out=self.current)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--elements", type=int, default=25_600_000, help="floats of one segment (default: %(default)s)")
    parser.add_argument("--codec", action="append", metavar="SPEC", help="may be repeated (default: all, and the naive ones)")
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON; - is standard output")


def run(arguments: argparse.Namespace) -> None:
    """Runs the benchmark and prints its table."""
    if arguments.elements < 1:
        raise SystemExit(f"--elements {arguments.elements} is not allowed; allowed is a whole number from 1 on")
    try:
        codecs = [parse(spec) for spec in arguments.codec or DEFAULT_CODECS]
    except ValueError as error:
        raise SystemExit(f"--codec: {error}") from None
    torch.set_num_threads(1)
    out = sys.stderr if arguments.json == "-" else sys.stdout
    triad = _Triad(arguments.elements)
    zeroed = torch.empty(arguments.elements)
    memset = _median(lambda: zeroed.zero_()) / _median(triad)
    print(f"{arguments.elements} elements, one thread; memset {memset:.2f} triads", file=out)
    print(f"{'codec':42}{'data':10}{'encode':>9}{'decode':>9}{'encode':>9}{'decode':>9}{'payload':>12}{'ratio':>8}", file=out)
    print(f"{'':42}{'':10}{'ms':>9}{'ms':>9}{'triads':>9}{'triads':>9}{'bytes':>12}", file=out, flush=True)
    rows = []
    cases: list[tuple[str, Callable[[Gradients, _Triad], Timed]]] = [(str(c), partial(_time_codec, c)) for c in codecs]
    if not arguments.codec:
        cases += [(name, partial(_time_naive, ops)) for name, ops in _NAIVE.items()]
    for data in ("gaussian", "laplace"):
        gradients = Gradients(data, arguments.elements)
        for name, measure in cases:
            timed = measure(gradients, triad)
            row = {
                "codec": name,
                "data": data,
                "elements": arguments.elements,
                "triad_s": timed.triad_s,
                "encode_s": timed.encode_s,
                "decode_s": timed.decode_s,
                "encode_triads": timed.encode_s / timed.triad_s,
                "decode_triads": timed.decode_s / timed.triad_s,
                "payload_bytes": timed.payload_bytes,
                "ratio": 4 * arguments.elements / timed.payload_bytes,
            }
            rows.append(row)
            print(
                f"{name:42}{data:10}{timed.encode_s * 1e3:9.2f}{timed.decode_s * 1e3:9.2f}{row['encode_triads']:9.2f}"
                f"{row['decode_triads']:9.2f}{timed.payload_bytes:12}{row['ratio']:8.1f}",
                file=out,
                flush=True,
            )
    if arguments.json == "-":
        json.dump(rows, sys.stdout, indent=1)
        print()
    elif arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


class _Triad:
    """What memory allows: reads two vectors and writes a third."""

    def __init__(self, elements: int) -> None:
        self._a, self._b = torch.ones(elements), torch.ones(elements)
        self._c = torch.empty(elements)

    def __call__(self) -> None:
        torch.add(self._a, self._b, out=self._c)


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _median(call: Callable[[], Any]) -> float:
    return statistics.median(_seconds(call) for _ in range(REPETITIONS))


def _time_codec(codec: Codec, gradients: Gradients, triad: _Triad) -> Timed:
    n = gradients.current.numel()
    codec = codec.for_shape((1, n))
    payload = torch.zeros(codec.max_payload(n), dtype=torch.uint8)
    residual, spare = (torch.zeros(n), torch.zeros(n)) if codec.has_residual else (None, None)
    decoded = torch.zeros(n)
    triads, encodes, decodes = [], [], []
    warm_up = WARM_UP if codec.has_residual else 1
    bytes_of_payload = 0
    for step in range(warm_up + REPETITIONS):
        grad = gradients.next()
        triads.append(_seconds(triad))
        start = time.perf_counter()
        encoded = codec.encode(_vector(grad), _maybe(residual), _maybe(spare), step, _vector(payload))
        encodes.append(time.perf_counter() - start)
        residual, spare = spare, residual
        bytes_of_payload = encoded.bytes
        assert encoded.finite
        if step >= warm_up:
            start = time.perf_counter()
            codec.decode([_vector(payload).slice(0, encoded.bytes)], 0.5, _vector(decoded))
            decodes.append(time.perf_counter() - start)
    last = slice(warm_up, None)
    return Timed(
        statistics.median(triads[last]), statistics.median(encodes[last]), statistics.median(decodes), bytes_of_payload
    )


def _vector(tensor: torch.Tensor) -> Vector:
    return Vector.of(tensor.numpy())


def _maybe(tensor: torch.Tensor | None) -> Vector | None:
    return None if tensor is None else _vector(tensor)


# --- the same as a chain of torch operations: (state, gradient) -> what would be sent, and its bytes; and the decoding of it


class _Naive(NamedTuple):
    encode: Callable[[torch.Tensor, torch.Tensor], tuple[Any, int]]
    decode: Callable[[Any, torch.Tensor], Any]
    warm_up: int


def _time_naive(ops: _Naive, gradients: Gradients, triad: _Triad) -> Timed:
    residual, decoded = torch.zeros(gradients.current.numel()), torch.zeros(gradients.current.numel())
    triads, encodes, decodes, size = [], [], [], 0
    for step in range(ops.warm_up + 3):
        grad = gradients.next()
        triads.append(_seconds(triad))
        start = time.perf_counter()
        sent, size = ops.encode(residual, grad)
        if step >= ops.warm_up:
            encodes.append(time.perf_counter() - start)
            decodes.append(_seconds(partial(ops.decode, sent, decoded)))
    return Timed(statistics.median(triads), statistics.median(encodes), statistics.median(decodes), size)


def _encode_half(_: torch.Tensor, grad: torch.Tensor) -> tuple[Any, int]:
    return grad.half(), 2 * grad.numel()


def _encode_adacomp(residual: torch.Tensor, grad: torch.Tensor, bin: int = 500) -> tuple[Any, int]:
    residual += grad
    padding = -grad.numel() % bin
    total = torch.nn.functional.pad(residual, (0, padding)).view(-1, bin)
    soft = torch.nn.functional.pad(residual + grad, (0, padding)).view(-1, bin)
    largest = total.abs().amax(1, keepdim=True)
    indices = (soft.abs() >= largest).view(-1)[: grad.numel()].nonzero().view(-1)
    values = residual[indices].sign() * largest.mean()
    residual[indices] -= values
    return (indices, values), 12 * indices.numel()


def _encode_qsgd(_: torch.Tensor, grad: torch.Tensor, bucket: int = 512, levels: int = 7) -> tuple[Any, int]:
    buckets = torch.nn.functional.pad(grad, (0, -grad.numel() % bucket)).view(-1, bucket)
    norms = buckets.norm(dim=1, keepdim=True)
    scaled = buckets.abs() / norms * levels
    low = scaled.floor()
    codes = ((low + (torch.rand_like(scaled) < scaled - low)) * buckets.sign()).to(torch.int8)
    return (codes, norms / levels), codes.numel() + 4 * norms.numel()


def _decode_qsgd(sent: Any, out: torch.Tensor) -> Any:
    codes, units = sent
    return out.add_((codes.float() * units).view(-1)[: out.numel()], alpha=0.5)


def _encode_topk(residual: torch.Tensor, grad: torch.Tensor, fraction: float = 0.01) -> tuple[Any, int]:
    residual += grad
    indices = residual.abs().topk(int(fraction * grad.numel())).indices
    values = residual[indices]
    residual[indices] = 0
    return (indices, values), 12 * indices.numel()


_NAIVE = {
    "torch: grad.half()": _Naive(_encode_half, lambda sent, out: out.add_(sent, alpha=0.5), 1),
    "torch: AdaComp, bins of 500": _Naive(_encode_adacomp, lambda sent, out: out.index_add_(0, *sent, alpha=0.5), 5),
    "torch: topk, 1 %": _Naive(_encode_topk, lambda sent, out: out.index_add_(0, *sent, alpha=0.5), 2),
    "torch: QSGD, a byte an element": _Naive(_encode_qsgd, _decode_qsgd, 1),
}
