"""From parameters to buckets: which codec each one gets, what travels together, and whether all ranks see it alike."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hvd_compress._version import __version__
from hvd_compress.codecs import Codec, Identity, parse
from hvd_compress.exchange import AUTO, shorter
from hvd_compress.message import WIRE_VERSION
from hvd_compress.options import check_bucket_bytes, check_exchange
from hvd_compress.vector import DTYPES


class MismatchError(RuntimeError):
    """Ranks do not compress alike; the text names the difference. Raised on every rank."""

    __init__ = Exception.__init__  # by which AutoGraph knows that it can raise it again, with more text, in traced code


class Parameter(NamedTuple):
    """What a plan needs to know of a parameter.

    Attributes:
        name: Unique among the parameters.
        shape: In elements.
        dtype: "float32", "float16", "bfloat16", "float64", or another one, which is then not compressed.
        layout: In what order its elements lie in memory, in words; two ranks must agree.
        key: What ranks know it by, where its name may be another one on each rank; "": its name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str = "row-major"
    key: str = ""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its gradient."""
        return self.numel * DTYPES.get(self.dtype, 4)


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which codec a parameter gets: the first override whose pattern its name matches, else `codec` for everything that has two
    or more dimensions and at least `min_numel` elements, else none: Horovod fuses those itself.

    Raises:
        ValueError: An option is not allowed.
    """  # noqa: D205

    codec: Codec
    min_numel: int = 1024
    overrides: Mapping[str, str | Codec] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.min_numel, bool) or not isinstance(self.min_numel, int) or self.min_numel < 0:
            raise ValueError(f"min_numel={self.min_numel!r} is not allowed; allowed is a whole number from 0 on")
        if not isinstance(self.overrides, Mapping):
            raise ValueError(f"overrides={self.overrides!r} is not allowed; allowed is a dict of name pattern to spec")
        for pattern in self.overrides:
            if not isinstance(pattern, str):
                raise ValueError(f"overrides: the pattern {pattern!r} is not allowed; allowed is a string")
        object.__setattr__(self, "overrides", {pattern: parse(spec) for pattern, spec in self.overrides.items()})

    def codec_for(self, parameter: Parameter) -> Codec:
        """The codec of one parameter, with its options filled in for the parameter's shape."""
        if parameter.dtype not in DTYPES:
            return Identity()
        for pattern, codec in self.overrides.items():
            if fnmatch.fnmatchcase(parameter.name, pattern):
                return parse(codec).for_shape(parameter.shape)
        small = len(parameter.shape) < 2 or parameter.numel < self.min_numel
        if small and self.codec.allreduce_dtype is None:
            return Identity()
        return self.codec.for_shape(parameter.shape)

    def check(self, names: Sequence[str]) -> None:
        """Raises ValueError where a pattern matches no parameter's name: most likely a typing error."""
        for pattern in self.overrides:
            if not fnmatch.filter(names, pattern):
                raise ValueError(f"overrides: the pattern {pattern!r} matches no parameter; there are {_some(names)}")


@dataclasses.dataclass(frozen=True)
class Segment:
    """One parameter's slice of a bucket.

    Attributes:
        index: Place among all parameters, the same on every rank.
        parameter: Which one.
        codec: What encodes it, options filled in.
        bucket: Index of its bucket; None where Horovod's own allreduce sends it.
        exchange: How it travels, "allgather" or "scatter-gather", as all of its bucket; None where that is.
    """

    index: int
    parameter: Parameter
    codec: Codec
    bucket: int | None
    exchange: str | None = None


class Plan:
    """The ordered parameters with their codecs and buckets. All ranks must have the same: see `digest` and `difference`.

    Args:
        parameters: In the order of the model; buckets are filled from the last one back, as backward produces gradients.
        policy: Chooses the codecs.
        bucket_bytes: A bucket holds so many bytes of gradient at most, or one larger segment.
        exchange: "allgather", "scatter-gather", or "auto": by codec, whichever sends less.
        ranks: Among how many.
        others: Names of parameters beside them, which are never compressed, but can be named in the policy.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        policy: Policy,
        bucket_bytes: int,
        exchange: str = AUTO,
        ranks: int = 1,
        others: Sequence[str] = (),
    ) -> None:
        check_bucket_bytes(bucket_bytes)
        check_exchange(exchange)
        policy.check([*(parameter.name for parameter in parameters), *others])
        self.policy = policy
        self.bucket_bytes = bucket_bytes
        self.exchange = exchange
        self.ranks = ranks
        segments: list[Segment] = []
        buckets = 0
        # By exchange, and codec where that wants all its parameters in one: the bucket that is not full, and its bytes.
        filling: dict[tuple[str, Codec | None], tuple[int, int]] = {}
        for index in reversed(range(len(parameters))):
            parameter = parameters[index]
            codec = policy.codec_for(parameter)
            if codec.allreduce_dtype is not None:
                segments.append(Segment(index, parameter, codec, None))
                continue
            way = exchange if exchange != AUTO else shorter(codec, ranks)
            whole = codec if codec.is_of_model else None
            bucket, filled = filling.get((way, whole), (-1, 0))
            if bucket < 0 or (whole is None and filled > 0 and filled + parameter.nbytes > bucket_bytes):
                bucket, filled = buckets, 0
                buckets += 1
            segments.append(Segment(index, parameter, codec, bucket, way))
            filling[way, whole] = (bucket, filled + parameter.nbytes)
        self.segments = tuple(reversed(segments))

    @property
    def buckets(self) -> list[list[Segment]]:
        """The segments of each bucket."""
        count = max((s.bucket for s in self.segments if s.bucket is not None), default=-1) + 1
        return [[s for s in self.segments if s.bucket == b] for b in range(count)]

    @cached_property
    def description(self) -> dict[str, Any]:
        """All that ranks must agree on, as plain data."""
        return {
            "version": __version__,
            "wire": WIRE_VERSION,
            "spec": str(self.policy.codec),
            "bucket_bytes": self.bucket_bytes,
            "exchange": self.exchange,
            "parameters": {
                _key(s.parameter): [list(s.parameter.shape), s.parameter.dtype, s.parameter.layout, str(s.codec), s.exchange]
                for s in self.segments
            },
        }

    def announcement(self, options: Mapping[str, Any] | None = None) -> np.ndarray:
        """The description as bytes (uint8), for `compare_announcements`, with names for its errors.

        `options` are others that ranks must agree on, as plain data by their names.
        """
        names = {_key(s.parameter): s.parameter.name for s in self.segments}
        text = json.dumps({**self.description, "names": names, "options": options or {}}).encode()
        return np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8).copy()

    @cached_property
    def digest(self) -> int:
        """64 bits that two plans share only if their descriptions, the order of parameters included, are equal."""
        text = json.dumps(self.description).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def bucket_name(index: int, segments: Sequence[Segment] = ()) -> str:
    """What the message of a bucket is called, for people: by its first and last parameter, where they have one name on all
    ranks.
    """  # noqa: D205
    names = [segment.parameter.name for segment in segments]
    name = f"bucket.{index}" + (f":{names[0]}" if names else "") + (f"..{names[-1]}" if len(names) > 1 else "")
    return re.sub(r'[\x00-\x1f"\\]', "_", name)  # Horovod writes it into JSON as it is


def compare_announcements(data: np.ndarray, ranks: int) -> None:
    """Raises MismatchError, which names the difference, where the ranks' announcements, one behind the other, differ."""
    rest = data.tobytes()
    descriptions = {}
    for rank in range(ranks):
        length = int.from_bytes(rest[:8], "little")
        descriptions[rank] = json.loads(rest[8 : 8 + length])
        rest = rest[8 + length :]
    found = difference(descriptions)
    if found is not None:
        raise MismatchError(f"the ranks do not compress alike: {found}")


def difference(descriptions: Mapping[int, Mapping[str, Any]]) -> str | None:
    """The first difference between the plans' descriptions of several ranks, in words; None where they agree."""
    (first, mine), *others = descriptions.items()
    named = {**mine.get("names", {})}
    for rank, other in others:
        if _comparable(mine) == _comparable(other):
            continue
        named = {**other.get("names", {}), **named}
        for key, word in (
            ("version", "hvd_compress version"),
            ("wire", "wire format"),
            ("spec", "spec"),
            ("bucket_bytes", "bucket_bytes"),
            ("exchange", "exchange"),
        ):
            if mine[key] != other[key]:
                return f"{word}: rank {first} has {mine[key]!r}, rank {rank} has {other[key]!r}"
        left, right = mine.get("options", {}), other.get("options", {})
        for option in {**left, **right}:
            if left.get(option) != right.get(option):
                return f"{option}: rank {first} has {left.get(option)!r}, rank {rank} has {right.get(option)!r}"
        left, right = mine["parameters"], other["parameters"]
        for has, lacks, names in ((first, rank, [*left]), (rank, first, [*right])):
            only = [name for name in names if name not in (right if has == first else left)]
            if only:
                return f"parameters: rank {has} has {_some([named.get(key, key) for key in only])}, rank {lacks} has not"
        for name in left:
            for mine_value, other_value, word in zip(
                left[name], right[name], ("shape", "dtype", "layout", "spec", "exchange"), strict=True
            ):
                if mine_value != other_value:
                    return (
                        f"{word} of {named.get(name, name)!r}: rank {first} has {mine_value!r}, rank {rank} has {other_value!r}"
                    )
        return f"the order of the parameters: rank {first} has {_some([*left])}, rank {rank} has {_some([*right])}"
    return None


def _key(parameter: Parameter) -> str:
    return parameter.key or parameter.name


def _comparable(description: Mapping[str, Any]) -> list[Any]:
    return [{**description, "names": None}, list(description["parameters"])]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "none"
