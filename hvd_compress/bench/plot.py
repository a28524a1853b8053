"""Draws step time against bandwidth for every codec, from what `step --json` has written at several rates.

``python -m hvd_compress.bench plot 100mbit.json 1gbit.json 10gbit.json --out benchmark.png``

A line is a codec, a broken one where we compress nothing; the thin dotted one of its colour is the bound, the time that its
bytes take at the measured bandwidth, or that of a step without exchange where that is longer. Needs matplotlib. A table of the
same is printed, in Markdown; MB are those at the highest rate.
"""

from __future__ import annotations

import argparse
import collections
import json
from pathlib import Path
from typing import Any

from hvd_compress.bench.models import DENSE, RIVALS

_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_KEYS = ["codec", "model", "compute_s", "hosts", "rate", "bandwidth", "bytes_sent", "bytes_card", "ratio"]
_KEYS += ["local_s", "step_s", "exposed_s", "bound_s", "speedup"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="of `step --json`")
    parser.add_argument("--codec", action="append", metavar="SPEC", help="may be repeated (default: all that there are)")
    parser.add_argument("--out", default="benchmark.png", help="any format of matplotlib (default: %(default)s)")


def run(arguments: argparse.Namespace) -> None:
    """Draws the plot."""
    rows = [row for file in arguments.files for row in _rows(file)]
    subjects = {(row["model"], row["compute_s"], row["hosts"]) for row in rows}
    if len(subjects) > 1:
        raise SystemExit(f"plot: the files are of different models, compute times or numbers of hosts: {sorted(subjects)}")
    if any(count > 1 for count in collections.Counter((row["codec"], rate_of(row)) for row in rows).values()):
        raise SystemExit("plot: two of the files are of one rate")
    codecs = list(dict.fromkeys(row["codec"] for row in rows))
    for codec in arguments.codec or []:
        if codec not in codecs:
            raise SystemExit(f"--codec {codec}: there are {', '.join(codecs)}")
    draw(rows, arguments.codec or codecs, arguments.out)
    print(table(rows, arguments.codec or codecs))


def _rows(file: str) -> list[dict[str, Any]]:
    try:
        rows = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"plot: {file} cannot be read: {error}") from None
    if not (isinstance(rows, list) and rows and all(isinstance(row, dict) and row.keys() >= {*_KEYS} for row in rows)):
        raise SystemExit(f"plot: {file} is not what `step --json` writes: each row has {', '.join(_KEYS)}")
    return rows


def rate_of(row: dict[str, Any]) -> float:
    """Bits a second of the cards, as they are limited or else as they were measured."""
    if row["rate"] is None and row["bandwidth"] is None:
        raise SystemExit("plot: a file is of one rank alone")
    if row["rate"] is None:
        return float(8 * row["bandwidth"])
    number = row["rate"].rstrip("kmgbit")
    return float(number) * _UNITS[row["rate"][len(number) :]]


def table(rows: list[dict[str, Any]], codecs: list[str]) -> str:
    """In Markdown: a line for each codec, with milliseconds of a step, of them exposed, and the speedup at each rate."""
    labels = {rate_of(row): row["rate"] or f"{rate_of(row) / 1e6:.0f} Mbit/s, measured" for row in rows}
    rates = sorted(labels)
    heads = ["codec", "MB sent", "by card", "times fewer"]
    heads += [head for rate in rates for head in (f"{labels[rate]}: step ms", "exposed", "bound", "speedup")]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for codec in codecs:
        at = {rate_of(row): row for row in rows if row["codec"] == codec}
        last = at[max(at)]
        card = "" if last["bytes_card"] is None else f"{last['bytes_card'] / 1e6:.2f}"
        cells = [f"`{codec}`", f"{last['bytes_sent'] / 1e6:.2f}", card, f"{last['ratio']:.1f}"]
        for rate in rates:
            row = at.get(rate)
            times = [f"{row[key] * 1e3:.0f}" for key in ("step_s", "exposed_s", "bound_s")] if row else [""] * 3
            cells += [*times, f"{row['speedup']:.2f}" if row else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], codecs: list[str], out: str) -> None:
    """Writes the plot to a file."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("plot: needs the package matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.5, 5.5), layout="constrained")
    colours = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
    for number, codec in enumerate(codecs):
        of_codec = sorted((row for row in rows if row["codec"] == codec), key=rate_of)
        rates = [rate_of(row) / 1e6 for row in of_codec]
        colour = colours[number % len(colours)]
        style = "s--" if codec in (*DENSE, *RIVALS) else "o-"
        axes.plot(rates, [row["step_s"] * 1e3 for row in of_codec], style, color=colour, label=codec)
        axes.plot(rates, [max(row["bound_s"], row["local_s"]) * 1e3 for row in of_codec], ":", color=colour, linewidth=1)
    axes.plot([], [], ":", color="grey", linewidth=1, label="bound")
    first = rows[0]
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="network card, Mbit/s",
        ylabel="step, ms",
        title=f"{first['model']}, {first['hosts']} hosts, {first['compute_s'] * 1e3:.0f} ms of compute",
    )
    axes.grid(visible=True, which="both", alpha=0.2)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(out, dpi=110)
    pyplot.close(figure)
