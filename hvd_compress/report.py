"""What a compression did, as a table for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hvd_compress.exchange import ALLREDUCE
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


def report(lines: Iterable[Line], stats: Stats, changes: Sequence[int] = ()) -> str:
    """A table of what was sent of each parameter in a step, the mean over all steps; codec and residual as they are now.

    "sent" is what this rank puts on the wire; "bits" what its payloads have for an element that was encoded; "selected" the
    part of the elements that was sent, of codecs that select. `changes`: after how many steps the codec was changed, which
    the first line tells.
    """
    table: list[tuple[str, ...]] = [_HEAD]
    encoded = selectable = 0  # elements, over all steps
    for line in lines:
        counters = stats.total.parameters.get(line.name)
        parameter = line.segment.parameter
        ways = [line.operation or ALLREDUCE]
        if counters is not None and ALLREDUCE in counters.exchanges:
            ways.append(ALLREDUCE)
        shape = "x".join(map(str, parameter.shape)) or "()"
        table.append((line.name, shape, str(line.segment.codec), " or ".join(dict.fromkeys(ways))))
        if counters is None:
            table[-1] += ("-",) * (len(_HEAD) - _LEFT)
            continue
        of_parameter = counters.encoded * parameter.numel
        encoded += of_parameter
        selectable += of_parameter if counters.selected is not None else 0
        table[-1] += _figures(counters, of_parameter, of_parameter, stats.steps)
    table.append(("all", "", "", "", *_figures(stats.total, encoded, selectable, stats.steps)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    texts = ["  ".join(map(_aligned, row, widths, range(len(row)))).rstrip() for row in table]
    texts.insert(-1, "-" * max(map(len, texts)))
    if stats.network is not None:
        texts.append(f"an exchange takes {_network(stats)}")
    return "\n".join([_title(stats.steps, [step for step in changes if step]), *texts])


def _title(steps: int, changes: list[int]) -> str:
    if not steps:
        return "nothing was sent yet; one process alone sends nothing"
    title = f"mean of {steps} steps, of this rank"
    if changes:
        title += f"; the codec was changed after {', '.join(map(str, changes))} of them: figures are of all, before and after"
    return title


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column < _LEFT else cell.rjust(width)


def _figures(counters: Counters, encoded: int, selectable: int, steps: int) -> tuple[str, ...]:
    steps = max(steps, 1)
    return (
        size_text(counters.bytes_dense / steps),
        size_text(counters.bytes_sent / steps),
        f"{counters.ratio:.1f}",
        f"{8 * counters.payload_bytes / encoded:.3f}" if encoded else "-",
        f"{counters.selected / selectable:.3%}" if counters.selected is not None and selectable else "-",
        f"{counters.residual_norm:.3g}" if counters.residual_sq else "-",
        f"{counters.encode_s / steps * 1e3:.2f}",
    )


def _network(stats: Stats) -> str:
    assert stats.network is not None
    latency, bandwidth = stats.network
    speed = "" if math.isinf(bandwidth) else f", and a second for {size_text(bandwidth)} of a message"
    return f"{latency * 1e3:.3f} ms{speed}"
