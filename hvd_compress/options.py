"""Options that the compressions of both frameworks have: defaults, and what is allowed."""

from __future__ import annotations

import re
from typing import Any

from hvd_compress.exchange import ALLGATHER, AUTO, SCATTER_GATHER

BUCKET_BYTES = 25 * 2**20
"""How much gradient travels in one message."""
PLAN_SECONDS = 10.0
"""How long a rank waits for the other ranks' plans before it goes on, and leaves errors to Horovod."""

SAME_ON_ALL = (
    "Every rank must pass an hvd_compress compression to its optimizer, with the optimizer's process_set, and make all its "
    "compressions in the same order, or give them a name=: this one's is {}."
)


def check_exchange(exchange: Any) -> str:
    """How payloads travel; ValueError where it is no such way."""
    allowed = (AUTO, ALLGATHER, SCATTER_GATHER)
    if exchange not in allowed:
        raise ValueError(f"exchange={exchange!r} is not allowed; allowed is {', '.join(map(repr, allowed))}")
    return str(exchange)


def check_name(name: Any, default: str) -> str:
    """The name of a compression; ValueError where it is none."""
    if name is None:
        return default
    if not isinstance(name, str) or not name or re.search(r'[\x00-\x1f"\\]', name):  # Horovod's timeline is JSON
        raise ValueError(f"name={name!r} is not allowed; allowed is a string of at least one character, without quotes")
    return name


def check_seed(seed: Any) -> int:
    """The seed; ValueError where it is none."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed!r} is not allowed; allowed is a whole number from 0 to 2^64 - 1")
    return seed


def check_bucket_bytes(bucket_bytes: Any) -> int:
    """The size of a bucket; ValueError where it is none."""
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes!r} is not allowed; allowed is a whole number from 1 on")
    return bucket_bytes
