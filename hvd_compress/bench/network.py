"""What benchmarks know of the network: what a card has sent, and how fast it is."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

CARD, RATE = "HVD_COMPRESS_BENCH_CARD", "HVD_COMPRESS_BENCH_RATE"
"""Environment variables of the processes on a cluster: the name of the host's card, and its rate."""

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_ENOUGH = 0.3  # seconds that a measurement should take
_MOST = 1 << 24  # bytes of a rank's message
_HEADERS = 14 + 20 + 32  # bytes of a packet: Ethernet's, IP's and TCP's


def bytes_of_card(name: str | None) -> int:
    """What a network card has sent so far; 0 where none is given."""
    return _counter(name, "tx_bytes")


def headers_of_card(name: str | None) -> int:
    """The bytes of it that are headers, as of TCP over IPv4 with time stamps, over Ethernet; 0 where no card is given.

    A card that splits long packets itself, as one without a rate does, counts each as one, with one set of headers.
    """
    return _HEADERS * _counter(name, "tx_packets")


def _counter(card: str | None, name: str) -> int:
    if not card:
        return 0
    try:
        return int(Path("/sys/class/net", card, "statistics", name).read_text())
    except OSError:
        raise SystemExit(f"--card {card}: there is no such network card") from None


def rate_of_cards() -> str | None:
    """What the cluster's cards are limited to, as tc takes it; None where they are not."""
    return os.environ.get(RATE) or None


def bits_of(rate: str) -> float:
    """Bits a second of a rate as tc takes it; ValueError where it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    if not found or not float(found[1]):
        raise ValueError(f"{rate} is not allowed; allowed is a rate such as 100mbit or 1gbit")
    return float(found[1]) * _UNITS[found[2]]


def bandwidth() -> float | None:
    """Bytes a second that a rank sends in an allgather of large messages, the best of three; None with one rank."""
    import horovod.torch as hvd

    if hvd.size() == 1:
        return None
    size = 1 << 18
    while (seconds := _allgather(size)) < _ENOUGH and size < _MOST:
        size *= 2
    return float((hvd.size() - 1) * size / min(seconds, _allgather(size), _allgather(size)))


def _allgather(size: int) -> float:
    """Seconds, of the slowest rank."""
    import horovod.torch as hvd
    import torch

    message = torch.zeros(size, dtype=torch.uint8)
    hvd.barrier()
    start = time.perf_counter()
    hvd.allgather(message, name=f"bandwidth.{size}")
    return float(max(hvd.allgather_object(time.perf_counter() - start)))
