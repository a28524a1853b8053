"""Draws step time against bandwidth for every codec, from what `step --json` has written at several rates.

``python -m hvd_compress.bench plot 100mbit.json 1gbit.json 10gbit.json --out benchmark.png``

A line is a codec, a broken one where we compress nothing; the thin dotted one of its colour is the bound, the time that its
bytes take at the measured bandwidth, or that of a step without exchange where that is longer. Needs matplotlib. A table of the
same is printed, in Markdown; MB are those at the highest rate.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hvd_compress.bench.models import DENSE, RIVALS
from hvd_compress.bench.network import bits_of

_SUBJECT = ("model", "compute_s", "hosts", "ranks", "exchange", "bucket_bytes")
"""What all files of a plot have alike."""
_TEXTS = ("codec", "model", "exchange")
_NUMBERS = ("compute_s", "hosts", "ranks", "bytes_sent", "ratio", "local_s", "step_s", "exposed_s", "bound_s", "speedup")
_OPTIONAL = ("rate", "bandwidth", "bytes_card", "bucket_bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="of `step --json`")
    parser.add_argument("--codec", action="append", metavar="SPEC", help="may be repeated (default: all that there are)")
    parser.add_argument("--out", default="benchmark.png", help="any format of matplotlib (default: %(default)s)")


def run(arguments: argparse.Namespace) -> None:
    """Draws the plot."""
    files = {file: _rows(file) for file in dict.fromkeys(arguments.files)}
    rows = [row for of_file in files.values() for row in of_file]
    for key in _SUBJECT:
        if len({row[key] for row in rows}) > 1:
            of_files = ", ".join(f"{file} {of_file[0][key]}" for file, of_file in files.items())
            raise SystemExit(f"plot: the files differ in {key}: {of_files}")
    by_rate: dict[Any, str] = {}
    for file, of_file in files.items():
        rate = of_file[0]["rate"]
        if (rate is None and by_rate) or None in by_rate or rate in by_rate:
            others = ", ".join(f"{other} {known or 'without a limit'}" for known, other in by_rate.items())
            its = f"of {rate}" if rate else "without a limit"
            raise SystemExit(
                f"plot: {file} is {its} beside {others}; allowed are files of different rates of `cluster --rate`, or a single "
                "one without"
            )
        by_rate[rate] = file
    if rows[0]["rate"] is None and rows[0]["bandwidth"] is None:
        raise SystemExit(f"plot: {arguments.files[0]} is of one rank alone, which sends nothing")
    codecs = list(dict.fromkeys(row["codec"] for row in rows))
    for codec in arguments.codec or []:
        if codec not in codecs:
            raise SystemExit(f"--codec {codec}: there are {', '.join(codecs)}")
    print(table(rows, arguments.codec or codecs))
    try:
        draw(rows, arguments.codec or codecs, arguments.out)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--out {arguments.out}: {error}") from None


def _rows(file: str) -> list[dict[str, Any]]:
    try:
        rows = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"plot: {file} cannot be read: {error}") from None
    if not (isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)):
        raise SystemExit(f"plot: {file} is not what `step --json` writes, a list of rows")
    for row in rows:
        for key in (*_TEXTS, *_NUMBERS, *_OPTIONAL):
            if key not in row:
                raise SystemExit(f"plot: {file} is not what `step --json` writes: a row has no {key}")
            value = row[key]
            is_right = isinstance(value, str if key in (*_TEXTS, "rate") else int | float)
            if not (is_right or (value is None and key in _OPTIONAL)):
                raise SystemExit(f"plot: {file} is not what `step --json` writes: {key} is {value!r}")
        try:
            bits_of(row["rate"] or "1gbit")
        except ValueError as error:
            raise SystemExit(f"plot: {file}: rate {error}") from None
    return rows


def rate_of(row: dict[str, Any]) -> float:
    """Bits a second of the cards, as they are limited or else as they were measured."""
    return bits_of(row["rate"]) if row["rate"] else float(8 * row["bandwidth"])


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
