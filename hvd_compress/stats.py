"""What was sent, and how long it took."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass
class Counters:
    """The figures of one parameter, or summed over several; of one step, or over all."""

    bytes_dense: float = 0
    """What dense training puts on this rank's wire: a ring allreduce, 2 (n-1)/n times the gradient."""
    bytes_sent: float = 0
    """What this rank did put on the wire, headers and Horovod's stand-ins included: (n-1) times a message that is gathered,
    2 (n-1)/n times one that is reduced."""
    selected: int | None = None
    """Elements sent; None where no codec chooses."""
    encode_s: float = 0
    """Seconds in encode."""
    wait_s: float = 0
    """Seconds that the training thread waited for other ranks' messages."""
    decode_s: float = 0
    """Seconds in decode."""
    residual_sq: float = 0
    """Squared L2 norm of the residual that the last step left."""

    @property
    def ratio(self) -> float:
        """Dense bytes over sent bytes; 1 where nothing was sent."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def residual_norm(self) -> float:
        """L2 norm of the residual that the last step left, in the gradient's units."""
        return math.sqrt(self.residual_sq)

    def add(self, other: Counters, *, later: bool) -> None:
        """Adds what another one counted, of another parameter or (`later`) of a later step, whose residual replaces ours."""
        self.bytes_dense += other.bytes_dense
        self.bytes_sent += other.bytes_sent
        if other.selected is not None:
            self.selected = (self.selected or 0) + other.selected
        self.encode_s += other.encode_s
        self.wait_s += other.wait_s
        self.decode_s += other.decode_s
        self.residual_sq = other.residual_sq + (0 if later else self.residual_sq)


@dataclasses.dataclass
class Record(Counters):
    """Counters in sum, and of each parameter by name."""

    parameters: dict[str, Counters] = dataclasses.field(default_factory=dict)

    def of(self, name: str) -> Counters:
        """The counters of one parameter, made where they are not there yet."""
        return self.parameters.setdefault(name, Counters())


class Stats:
    """The figures of a compression, always on.

    Attributes:
        steps: How many steps were finished.
        step: A `Record` of the last finished step.
        total: A `Record` of all finished steps.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.step = Record()
        self.total = Record()

    def finish(self, step: Record) -> None:
        """Takes the record of a step that is over: `of()` was called for its parameters, the sums are made here."""
        for name, counters in step.parameters.items():
            step.add(counters, later=False)
            self.total.of(name).add(counters, later=True)
        self.total.add(step, later=True)
        self.step = step
        self.steps += 1
