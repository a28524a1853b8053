"""What sending costs, for codecs that choose at every step how much to send: CAT (arXiv 2003.06377), section 4 of the paper."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hvd_compress import _kernels
from hvd_compress.codecs.base import Codec

PACKET_BYTES = 1500
"""What an Ethernet frame holds."""


def _shared(default: Any) -> Any:
    return dataclasses.field(default=default, metadata={"shared": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costed(Codec):
    """A codec that chooses what has the largest improvement over its cost; P are the bytes of the payload that it takes."""

    cost: str = _shared("measured")
    """ "measured": as "time", with numbers that the compression measures on its own messages. "bits": 8 P. "packets":
    c0 + c1 ceil(P / pmax). "time": latency + P / bandwidth."""
    c0: float | None = _shared(None)
    """packets: the cost of sending at all; default 0."""
    c1: float | None = _shared(None)
    """packets: the cost of a packet; default 1."""
    pmax: int | None = _shared(None)
    """packets: bytes in a packet; default 1500."""
    latency: float | None = _shared(None)
    """time: seconds that an exchange takes, whatever its size."""
    bandwidth: float | None = _shared(None)
    """time: bytes of a payload in a second of an exchange. (Of n ranks with a card each of B bytes a second: B / (n-1) in an
    allgather.)"""

    def _check_cost(self) -> None:
        """Raises ValueError where an option is not allowed or missing; fills in the defaults of "packets"."""
        if not self.chooses:
            self._check_no_cost()
            return
        if self.cost not in _kernels.CostKind.__members__:
            raise self._refuse("cost", ", ".join(repr(cost) for cost in _kernels.CostKind.__members__))
        if self.cost == "packets":
            for option, default in (("c0", 0.0), ("c1", 1.0), ("pmax", PACKET_BYTES)):
                if getattr(self, option) is None:
                    object.__setattr__(self, option, default)
        for option, of, low in (
            ("c0", "packets", 0),
            ("c1", "packets", 0),
            ("pmax", "packets", 1),
            ("latency", "time", 0),
            ("bandwidth", "time", math.ulp(0)),
        ):
            value = getattr(self, option)
            if self.cost != of:
                if value is not None:
                    raise ValueError(f"{self.name}: {option}={value!r} belongs to cost='{of}', and cost is {self.cost!r}")
            elif value is None:
                raise ValueError(f"{self.name}: cost='time' needs a latency in seconds and a bandwidth in bytes a second")
            elif isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < math.inf:
                raise self._refuse(option, "a finite number " + ("above 0" if option == "bandwidth" else f"from {low} on"))
            elif option == "pmax":
                self._check_integer("pmax", 1, 2**40)
            else:
                object.__setattr__(self, option, float(value))
        if self.cost == "packets" and self.c0 == self.c1 == 0:
            raise self._refuse("c1", "a number above 0 where c0 is 0")

    @property
    def chooses(self) -> bool:
        """Whether how much is sent is chosen at every step."""
        return True

    @property
    def is_measured(self) -> bool:
        """Whether the cost is what the compression measures."""
        return self.chooses and self.cost == "measured"

    def _check_no_cost(self) -> None:
        for field in dataclasses.fields(Costed):
            if (value := getattr(self, field.name)) != field.default:
                raise ValueError(f"{self.name}: {field.name}={value!r} belongs to a codec that chooses how much to send")

    def cost_options(self) -> dict[str, Any]:
        """What the kernels need to know of the cost."""
        cost: dict[str, Any] = {}
        if self.cost == "packets":
            cost = {"c0": self.c0, "c1": self.c1, "packet_bytes": float(self.pmax or PACKET_BYTES)}
        if self.cost == "time":
            cost = {"latency": self.latency, "seconds_per_byte": 1 / (self.bandwidth or math.inf)}
        return {"cost": _kernels.CostModel(getattr(_kernels.CostKind, self.cost), **cost)}
