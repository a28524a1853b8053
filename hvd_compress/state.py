"""What a saved state belongs to: it is of use only to the same rank of the same job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvd_compress._version import __version__
from hvd_compress.plan import Segment

FORMAT = 2


def identity(spec: str, parameters: Mapping[str, list[Any]], world_size: int, rank: int) -> dict[str, Any]:
    """The part of a state that says whose it is, as plain data. `parameters`: shape and codec of each, by name."""
    return {
        "format": FORMAT,
        "version": __version__,
        "world_size": world_size,
        "rank": rank,
        "spec": spec,
        "parameters": dict(parameters),
    }


def described(segment: Segment) -> list[Any]:
    """Shape, codec and exchange of a segment, for `identity`."""
    return [list(segment.parameter.shape), str(segment.codec), segment.exchange]


def check(saved: Any, **kinds: type) -> None:
    """Raises ValueError where that is nothing that a compression saved, or one that this version cannot read.

    `kinds`: of what the caller saves besides `identity`.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(f"the state is a {type(saved).__name__}, not what a compression's state_dict() gives")
    if saved.get("format") != FORMAT:
        raise ValueError(f"the state has format {saved.get('format')!r}, this version of hvd_compress reads {FORMAT}")
    for key, kind in {"world_size": int, "rank": int, "spec": str, "parameters": dict, "seed": int, **kinds}.items():
        if not isinstance(saved.get(key), kind):
            raise ValueError(f"the state's {key!r} is {saved.get(key)!r}, not what a compression's state_dict() gives")
    for name, residual in saved.get("residuals", {}).items():
        expected = saved["parameters"].get(name, [None])[0]
        if list(residual.shape) != expected:
            raise ValueError(f"the state's residual of {name!r} has shape {list(residual.shape)}, its parameter {expected}")


def difference(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """The first thing in which a saved state is of another job or rank, in words; None where it is ours."""
    for key, word in (("world_size", "world size"), ("rank", "rank"), ("spec", "spec")):
        if mine[key] != saved[key]:
            return f"its {word} is {saved[key]!r}, here it is {mine[key]!r}"
    for name in [*mine["parameters"], *saved["parameters"]]:
        here, there = mine["parameters"].get(name), saved["parameters"].get(name)
        if here != there:
            return f"parameter {name!r} is {there or 'not there'} in it, and {here or 'not there'} here"
    return None
