"""Gradients that are reduced together: their plan, and what is traced for them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from hvd_compress import _kernels
from hvd_compress.codecs import Codec
from hvd_compress.exchange import SCATTER_GATHER
from hvd_compress.plan import Plan, Policy, bucket_name
from hvd_compress.report import Line
from hvd_compress.tensorflow import ops
from hvd_compress.tensorflow.exchange import Exchange
from hvd_compress.tensorflow.gradients import Gradients, loss_scale
from hvd_compress.tensorflow.slot import Slot


class Group:
    """Variables whose gradients Horovod reduces together, in that order, and how they are compressed.

    What travels together was decided by the first plan, since it is part of the graphs that were traced; another plan can
    only give the segments other codecs.
    """

    def __init__(self, index: int, slots: Sequence[Slot], make_plan: Callable[[Policy], Plan], policy: Policy) -> None:
        self._index = index
        self.slots = list(slots)
        self._make_plan = make_plan
        self.plan = make_plan(policy)
        self._codecs = [segment.codec for segment in self.plan.segments]  # of what Horovod's allreduce carries: as they were
        self._buckets = [
            _Bucket(number, segments[0].exchange == SCATTER_GATHER, [(s.index, s.parameter.numel) for s in segments])
            for number, segments in enumerate(self.plan.buckets)
        ]
        self._gathered = {member for bucket in self._buckets for member in bucket.members}
        self._numbers: list[int] = []  # the session's, one for each time that one graph has the group
        self._times: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def set_policy(self, policy: Policy, session: _kernels.Session, exchange: Exchange) -> list[str]:
        """Takes other codecs; returns the names of the parameters that cannot, since Horovod's allreduce carries them."""
        self.plan = self._make_plan(policy)
        self._measure(session, exchange)
        for number in self._numbers:
            session.set_digest(number, self.plan.digest)
        refused = []
        for member, segment in enumerate(self.plan.segments):
            if member in self._gathered:
                codec = segment.codec
                session.set_codec(self.slots[member].segment, codec.kernel, codec.has_residual)
            elif segment.codec.allreduce_dtype is None:
                refused.append(segment.parameter.name)
        return refused

    def lines(self) -> list[Line]:
        """Of the compression's report."""
        names = {m: f"{self._index}.{bucket_name(bucket.number)}" for bucket in self._buckets for m in bucket.members}
        return [
            Line(slot.label, s, names.get(i, ""))
            for i, (slot, s) in enumerate(zip(self.slots, self.plan.segments, strict=True))
        ]

    def trace(self, found: Gradients, session_number: int, exchange: Exchange, scaler: Any, stage_of: StageOf) -> Traced:
        """Adds to the graph what comes before Horovod's own allreduces."""
        session = _kernels.session(session_number)
        grads = [found.grads[place] for place in found.dense]
        variables = [found.variables[place] for place in found.dense]
        graph = grads[0].graph
        time = self._times.get(graph, 0)
        self._times[graph] = time + 1
        while len(self._numbers) <= time:
            self._numbers.append(self._add_to(session, exchange))
        common = {"session": session_number, "group": self._numbers[time]}
        name = f"{self._index}" + (f".{time}" if time else "")
        with _beside(grads[0]):
            world = exchange.world()
            scale = loss_scale(scaler)
            stage = stage_of(found, world, scale)
            traced = Traced(found.grads, grads, self.slots, common, f"hvd_compress_{name}", self._codecs)
            states = [slot.state.handle for slot in self.slots]
            for bucket in self._buckets:
                messages, stand_ins, denses = [], [], []
                for member in bucket.members:
                    dense, weights, momentum = stage(variables[member])
                    message, stand_in = ops.library().hvd_compress_encode(
                        grad=grads[member],
                        residual=self.slots[member].residual.handle,
                        piece_residual=self.slots[member].piece_residual.handle,
                        state=states[member],
                        world=world,
                        scale=scale,
                        dense=dense,
                        weights=weights,
                        momentum=momentum,
                        variable=_handle(variables[member]),
                        member=member,
                        bucket=bucket.number,
                        scattered=bucket.scattered,
                        name=f"hvd_compress_{name}_gradient_{member}",
                        **common,
                    )
                    messages.append(message)
                    stand_ins.append(stand_in)
                    denses.append(dense)
                gathered, places = self._exchanged(bucket, messages, world, exchange, name, common)
                for row, member in enumerate(bucket.members):
                    traced.gathered[member] = GatheredMember(
                        stand_ins[row], denses[row], gathered, places, row, bucket.scattered
                    )
            for member, grad in enumerate(grads):
                if member not in self._gathered and grad.dtype in ops.DTYPES:
                    traced.arrived[member] = ops.library().hvd_compress_arrive(
                        state=states[member],
                        grad=grad,
                        member=member,
                        name=f"hvd_compress_{name}_gradient_{member}",
                        reduced_size=_reduced_dtype(self._codecs[member], grad.dtype).size,
                        **common,
                    )
        return traced

    def _add_to(self, session: _kernels.Session, exchange: Exchange) -> int:
        number = session.add_group([slot.segment for slot in self.slots], self.plan.digest)
        self._measure(session, exchange)
        for bucket in self._buckets:
            if bucket.scattered:
                session.add_scattered_bucket(number, bucket.number, bucket.sizes)
        return number

    def _measure(self, session: _kernels.Session, exchange: Exchange) -> None:
        if any(segment.codec.is_measured for segment in self.plan.segments):
            session.measure(exchange.network)

    def _exchanged(
        self,
        bucket: _Bucket,
        messages: Sequence[tf.Tensor],
        world: tf.Tensor,
        exchange: Exchange,
        name: str,
        common: Mapping[str, int],
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Adds what makes of a bucket's messages of one segment those of all ranks; and where the payloads are in them."""
        slots = [self.slots[member] for member in bucket.members]
        residual = slots[0].residual.handle
        common = {"bucket": bucket.number, **common}
        name = f"{name}.{bucket_name(bucket.number)}"
        library = ops.library()
        message = library.hvd_compress_pack(residual=residual, messages=messages, scattered=bucket.scattered, **common)
        if bucket.scattered:
            own, lengths = library.hvd_compress_scatter(residual=residual, message=message, world=world, **common)
            message = library.hvd_compress_reduce(
                received=exchange.alltoall(name, own, lengths),
                world=world,
                piece_residual=[slot.piece_residual.handle for slot in slots],
                state=[slot.state.handle for slot in slots],
                members=bucket.members,
                **common,
            )
            name += ".mean"
        gathered = exchange.allgather(name, message)
        places = library.hvd_compress_unpack(
            residual=residual, gathered=gathered, members=bucket.members, scattered=bucket.scattered, **common
        )
        return gathered, places


class EncodeInputs(NamedTuple):
    """What decides, in the graph, what of a variable's gradient is sent; see the op Encode.

    Attributes:
        dense: Whether Horovod's own allreduce carries it in this step (bool, no dimensions).
        weights: Of the gradient and of the momentum (float32 [2]), or none.
        momentum: What the gradient is averaged with (float32, its shape), or none.
    """

    dense: Any = False
    weights: Any = ()
    momentum: Sequence[tf.Tensor] = ()


StageOf = Callable[[Gradients, tf.Tensor, tf.Tensor], Callable[[Any], EncodeInputs]]
"""Of what is reduced together, the own rank and the number of ranks (int32 [2]) and the loss scale (float32, no dimensions),
gives what `EncodeInputs` each of the variables has."""


class _Bucket(NamedTuple):
    """Members that travel in one message, each with its number of elements."""

    number: int
    scattered: bool
    sizes: list[tuple[int, int]]

    @property
    def members(self) -> list[int]:
        return [member for member, _ in self.sizes]


class GatheredMember(NamedTuple):
    """A member whose payload travels in a message.

    Attributes:
        stand_in: What Horovod's own allreduce gets.
        dense: Whether that is the gradient itself.
        gathered: The messages of all ranks.
        places: Where the payloads of the bucket's members are in them.
        row: The member's, in `places`.
        scattered: Whether they are of pieces of the mean.
    """

    stand_in: tf.Tensor
    dense: Any
    gathered: tf.Tensor
    places: tf.Tensor
    row: int
    scattered: bool


@dataclasses.dataclass
class Traced:
    """A group in one graph.

    Attributes:
        found: Horovod's own list of the gradients, by which a trace is known.
        grads: The gradients of its members.
        slots: What is kept of its members.
        common: Attributes that all ops have.
        prefix: Begins the names of tensors that Horovod names its operations after.
        codecs: Of its members, by the first plan.
        gathered: By member, what is gathered.
        arrived: By member, a gradient that Horovod's own allreduce is to carry.
        taken: How often `compress` has been called with a gradient, by its id.
    """

    found: Sequence[Any]
    grads: list[tf.Tensor]
    slots: list[Slot]
    common: dict[str, int]
    prefix: str
    codecs: list[Codec]
    gathered: dict[int, GatheredMember] = dataclasses.field(default_factory=dict)
    arrived: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    taken: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)

    def take(self, tensor: tf.Tensor) -> int:
        """The member whose gradient that is; where several have the same tensor, the next one."""
        members = [member for member, grad in enumerate(self.grads) if grad is tensor]
        self.taken[id(tensor)] += 1
        return members[self.taken[id(tensor)] - 1]

    def to_reduce(self, member: int) -> tf.Tensor:
        """What Horovod's own allreduce gets of a member."""
        if member in self.gathered:
            return self.gathered[member].stand_in
        if member in self.arrived:
            grad = self.arrived[member]
            dtype = _reduced_dtype(self.codecs[member], grad.dtype)
            return tf.cast(grad, dtype, name=f"{self.prefix}_gradient_{member}_{dtype.name}")
        return self.grads[member]

    def result(self, member: int, reduced: tf.Tensor) -> tf.Tensor:
        """The mean or sum of a member's gradients, from what Horovod's own allreduce gave."""
        grad, state = self.grads[member], self.slots[member].state.handle
        if member in self.gathered:
            _, dense, gathered, places, row, scattered = self.gathered[member]
            result = ops.library().hvd_compress_decode(
                state=state,
                gathered=gathered,
                places=places,
                stand_in=reduced,
                grad=grad,
                dense=dense,
                member=member,
                row=row,
                scattered=scattered,
                **self.common,
            )
        elif member in self.arrived:
            reduced = tf.cast(reduced, grad.dtype)
            undone = bool(self.gathered)  # where a result is not finite; a residual, that is
            result = ops.library().hvd_compress_finish(state=state, grad=reduced, member=member, check=undone, **self.common)
        else:
            return reduced
        result.set_shape(grad.shape)
        return result


def _reduced_dtype(codec: Codec, dtype: tf.DType) -> tf.DType:
    if codec.allreduce_dtype == "float16":
        return tf.float16
    return tf.float32 if dtype == tf.bfloat16 else dtype  # Horovod does not reduce it


def _handle(variable: Any) -> list[tf.Tensor]:
    handle = getattr(variable, "handle", None)
    return [] if handle is None or handle.dtype != tf.resource else [handle]


@contextlib.contextmanager
def _beside(tensor: tf.Tensor) -> Iterator[None]:
    """The graph that the gradient is in, outside of the tf.cond that Horovod is tracing for it.

    There, what is made of one gradient can be put into a message with what is made of others.
    """
    graph = tensor.graph
    with graph.as_default(), tf.device("CPU:0"):
        context = graph._get_control_flow_context()  # of a tf.cond of TensorFlow 1, which is no graph of its own
        graph._set_control_flow_context(tensor.op._get_control_flow_context())
        try:
            yield
        finally:
            graph._set_control_flow_context(context)
