"""What was sent, and how long it took."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from hvd_compress.exchange import ALLGATHER, ALLREDUCE, SCATTER_GATHER

if TYPE_CHECKING:
    from hvd_compress import _kernels
    from hvd_compress.codecs import Encoded

STAND_IN_BYTES = 16
"""What Horovod's own allreduce gets instead of a gradient: four floats."""


@dataclasses.dataclass
class Counters:
    """The figures of one parameter, or summed over several; of one step, or over all."""

    bytes_dense: float = 0
    """What dense training puts on this rank's wire: a ring allreduce, 2 (n-1)/n times the gradient."""
    bytes_sent: float = 0
    """What this rank did put on the wire, headers and Horovod's stand-ins included: (n-1) times a message that is gathered,
    2 (n-1)/n times one that is reduced; of one that is scattered what goes to others, and (n-1) times the own chunk's mean."""
    exchanges: frozenset[str] = frozenset()
    """How it was sent: "allreduce" (Horovod's own), "allgather" or "scatter-gather"."""
    payload_bytes: float = 0
    """What this rank's own gradient was encoded to; 0 where Horovod's own allreduce carried it."""
    encoded: int = 0
    """Gradients that were encoded: of one parameter, steps."""
    selected: int | None = None
    """Elements sent; None where no codec chooses."""
    encode_s: float = 0
    """Seconds in encode."""
    wait_s: float = 0
    """Seconds that PyTorch's training thread waited for other ranks' messages; in TensorFlow, where no thread waits, that the
    bucket's message was under way. Counted with one parameter of each bucket."""
    decode_s: float = 0
    """Seconds in decode."""
    residual_sq: float = 0
    """Squared L2 norm of the residual that the last step left."""
    energy: float = 0
    """Where a codec chose how much to send: the squared L2 norm of what was to be sent."""
    improved: float = 0
    """And so much of it as that was expected to bring; see `improvement`."""

    @property
    def improvement(self) -> float:
        """CAT: the part of the gradient's energy, or of a smooth loss's expected decrease, that what was sent brings, 0 to 1;
        0 where no codec chose.
        """  # noqa: D205
        return self.improved / self.energy if self.energy else 0.0

    @property
    def improvement_per_bit(self) -> float:
        """`improvement` over the bits of the payloads."""
        return self.improvement / (8 * self.payload_bytes) if self.payload_bytes else 0.0

    @property
    def ratio(self) -> float:
        """Dense bytes over sent bytes; 1 where nothing was sent."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def residual_norm(self) -> float:
        """L2 norm of the residual that the last step left, in the gradient's units."""
        return math.sqrt(self.residual_sq)

    def count_gathered(self, ranks: int, grad_bytes: float, message_bytes: float) -> None:
        """Sets the bytes of a gradient whose part of a message was gathered, and of its stand-in."""
        self._count(ALLGATHER, ranks, grad_bytes, (ranks - 1) * message_bytes + _ring(ranks) * STAND_IN_BYTES)

    def count_scattered(self, ranks: int, grad_bytes: float, sent_bytes: float) -> None:
        """Sets the bytes of a gradient of which so many were sent to others, and of its stand-in."""
        self._count(SCATTER_GATHER, ranks, grad_bytes, sent_bytes + _ring(ranks) * STAND_IN_BYTES)

    def count_reduced(self, ranks: int, grad_bytes: float, reduced_bytes: float) -> None:
        """Sets the bytes of a gradient that Horovod's own allreduce carried."""
        self._count(ALLREDUCE, ranks, grad_bytes, _ring(ranks) * reduced_bytes)

    def count_encoded(self, encoded: Encoded) -> None:
        """Sets what encoding this rank's gradient gave."""
        self.payload_bytes, self.selected, self.encoded = encoded.bytes, encoded.selected, 1
        self.energy, self.improved = encoded.energy, encoded.energy * encoded.improvement

    def _count(self, exchange: str, ranks: int, grad_bytes: float, sent_bytes: float) -> None:
        self.exchanges = frozenset({exchange})
        self.bytes_dense = _ring(ranks) * grad_bytes
        self.bytes_sent = sent_bytes

    @classmethod
    def of_session(cls, counted: _kernels.Counters, ranks: int) -> Counters:
        """What a session counted of a segment."""
        ways = {ALLGATHER: counted.gathered, SCATTER_GATHER: counted.scattered, ALLREDUCE: counted.reduced}
        ring = _ring(ranks)
        return cls(
            bytes_dense=ring * counted.grad_bytes,
            bytes_sent=(ranks - 1) * counted.gathered_bytes + counted.scattered_bytes + ring * counted.reduced_bytes,
            exchanges=frozenset(way for way, was_taken in ways.items() if was_taken),
            selected=None if counted.selected < 0 else counted.selected,
            encode_s=counted.encode_s,
            wait_s=counted.wait_s,
            decode_s=counted.decode_s,
            residual_sq=counted.residual_sq,
            payload_bytes=counted.payload_bytes,
            encoded=counted.encoded,
            energy=counted.energy,
            improved=counted.improved,
        )

    def add(self, other: Counters, *, later: bool) -> None:
        """Adds what another one counted, of another parameter or (`later`) of a later step, whose residual replaces ours."""
        self.bytes_dense += other.bytes_dense
        self.bytes_sent += other.bytes_sent
        self.payload_bytes += other.payload_bytes
        self.encoded += other.encoded
        self.energy += other.energy
        self.improved += other.improved
        self.exchanges |= other.exchanges
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

    @classmethod
    def of_parameters(cls, parameters: Mapping[str, Counters]) -> Record:
        """The record of parameters whose counters are complete."""
        record = cls(parameters=dict(parameters))
        for counters in parameters.values():
            record.add(counters, later=False)
        return record


class Network(NamedTuple):
    """What sending costs, as it was measured: an exchange takes ``latency + bytes / bandwidth``, with the bytes of one message.

    Attributes:
        latency: Seconds.
        bandwidth: Bytes a second; infinite where larger messages took no longer.
    """

    latency: float
    bandwidth: float

    @classmethod
    def of(cls, meter: _kernels.Meter) -> Network | None:
        """The fit of a meter, if it has one."""
        fit = meter.step()
        if not meter.is_fitted:
            return None
        return cls(fit.latency, math.inf if fit.seconds_per_byte <= meter.FASTEST else 1 / fit.seconds_per_byte)


class Stats:
    """The figures of a compression, always on.

    Attributes:
        network: What sending costs, where a codec asks for that and it is measured already; else None.
        steps: How many steps were finished.
        step: A `Record` of the last finished step.
        total: A `Record` of all finished steps.
    """

    def __init__(self) -> None:
        self.network: Network | None = None
        self.steps = 0
        self.step = Record()
        self.total = Record()

    def summary(self) -> str:
        """The last step in one short line, as for tqdm's `set_postfix_str`."""
        step = self.step
        times = f"encode {step.encode_s * 1e3:.1f} ms, wait {step.wait_s * 1e3:.1f} ms, decode {step.decode_s * 1e3:.1f} ms"
        return f"{step.ratio:.1f}x fewer bytes, {size_text(step.bytes_sent)} sent, {times}"

    def __repr__(self) -> str:
        """How many steps, and what they sent."""
        return f"<Stats of {self.steps} steps: {self.total.bytes_sent:.0f} bytes sent, ratio {self.total.ratio:.1f}>"

    @classmethod
    def of(
        cls, steps: int, step: Mapping[str, Counters], total: Mapping[str, Counters], network: Network | None = None
    ) -> Stats:
        """The figures of so many steps, the last one and all, by parameter."""
        stats = cls()
        stats.network = network
        stats.steps, stats.step, stats.total = steps, Record.of_parameters(step), Record.of_parameters(total)
        return stats

    def finish(self, step: Record) -> None:
        """Takes the record of a step that is over: `of()` was called for its parameters, the sums are made here."""
        for name, counters in step.parameters.items():
            step.add(counters, later=False)
            self.total.of(name).add(counters, later=True)
        self.total.add(step, later=True)
        self.step = step
        self.steps += 1


def size_text(count: float) -> str:
    """Bytes, with a unit."""
    unit = min(int(math.log10(count) / 3), 4) if count >= 1 else 0
    return f"{count / 1000**unit:.{2 if unit else 0}f} {['B', 'kB', 'MB', 'GB', 'TB'][unit]}"


def _ring(ranks: int) -> float:
    """Times its size that a ring allreduce sends of a tensor, from each rank."""
    return 2 * (ranks - 1) / ranks
