"""What a compression did, as a table for people."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from hvd_compress.plan import Segment
from hvd_compress.stats import Counters, Stats, size_text

_LEFT = 4  # columns of text; the others are numbers
_HEAD: tuple[str, ...] = (
    "parameter",
    "shape",
    "codec",
    "sent in",
    "dense",
    "sent",
    "times fewer",
    "bits",
    "selected",
    "|residual|",
    "encode ms",
)


class Line(NamedTuple):
    """One of the table.

    Attributes:
        name: Of the parameter, as in `Stats`.
        segment: In the plan.
        operation: Its message's name in Horovod's timeline; "" where Horovod's own allreduce carries it.
    """

    name: str
    segment: Segment
    operation: str


def report(lines: Iterable[Line], stats: Stats) -> str:
    """A table of what was sent of each parameter in a step, the mean over all steps; of the residual as it is now.

    "sent" is what this rank puts on the wire, "bits" what its payload has for an element of the gradient.
    """
    steps = max(stats.steps, 1)
    table: list[tuple[str, ...]] = [_HEAD]
    compressed = 0  # elements
    for line in lines:
        counters = stats.total.parameters.get(line.name)
        shape = "x".join(map(str, line.segment.parameter.shape)) or "()"
        what = (line.name, shape, str(line.segment.codec), line.operation or "allreduce")
        numel = line.segment.parameter.numel
        compressed += numel if counters is not None and counters.payload_bytes else 0
        table.append((*what, *_figures(counters, numel, steps)))
    table.append(("all", "", "", "", *_figures(stats.total, compressed, steps)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    texts = ["  ".join(map(_aligned, row, widths, range(len(row)))).rstrip() for row in table]
    texts.insert(-1, "-" * max(map(len, texts)))
    if stats.network is not None:
        texts.append(f"an exchange takes {_network(stats)}")
    return "\n".join([f"mean of {stats.steps} steps, of this rank", *texts])


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column < _LEFT else cell.rjust(width)


def _figures(counters: Counters | None, numel: int, steps: int) -> tuple[str, ...]:
    if counters is None:
        return ("-",) * (len(_HEAD) - _LEFT)
    return (
        size_text(counters.bytes_dense / steps),
        size_text(counters.bytes_sent / steps),
        f"{counters.ratio:.1f}",
        f"{8 * counters.payload_bytes / steps / max(numel, 1):.3f}" if counters.payload_bytes else "-",
        f"{counters.selected / steps / max(numel, 1):.3%}" if counters.selected is not None else "-",
        f"{counters.residual_norm:.3g}" if counters.residual_sq else "-",
        f"{counters.encode_s / steps * 1e3:.2f}",
    )


def _network(stats: Stats) -> str:
    assert stats.network is not None
    latency, bandwidth = stats.network
    speed = "" if math.isinf(bandwidth) else f", and a second for {size_text(bandwidth)} of a message"
    return f"{latency * 1e3:.3f} ms{speed}"
