"""The one place that knows how Horovod's optimizer calls a compressor.

Horovod calls `compress` with each gradient as backward produces it, in an order of each rank's own, and `decompress` with each
result once all have been handed over. Between the two lies a round: `compress` encodes the gradient into its bucket's message
and enqueues the message when its last segment is there; what Horovod's own allreduce then gets is a stand-in of one element,
which comes back as 1 for op=Average and as the number of ranks for op=Sum. `decompress` waits for the bucket's message of every
rank and decodes. `compress` never waits (a rank whose backward runs in another order would wait for ever), but once: before
the first message of a plan it lets the ranks compare their plans.
"""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import horovod.torch as hvd
import torch
from horovod.torch.compression import Compressor
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvd_compress import _kernels, state
from hvd_compress._kernels import PayloadError
from hvd_compress.codecs import Codec, parse
from hvd_compress.codecs.base import ASSUMED, Measured, Momentum
from hvd_compress.exchange import AUTO
from hvd_compress.message import Flags, Message
from hvd_compress.options import BUCKET_BYTES, PLAN_SECONDS, SAME_ON_ALL, check_exchange, check_name, check_seed
from hvd_compress.plan import MismatchError, Plan, Policy, bucket_name, compare_announcements
from hvd_compress.report import Line, report
from hvd_compress.stats import Network, Stats
from hvd_compress.torch.bucket import Bucket
from hvd_compress.torch.encoder import Encoder
from hvd_compress.torch.exchange import Exchange, Pending, StandIn
from hvd_compress.torch.memory import Scratch, sample, vector
from hvd_compress.torch.round import Context, Round
from hvd_compress.torch.slot import Slot, make_slots

_alive: weakref.WeakSet[CodecCompressor] = weakref.WeakSet()
_made: dict[int, int] = {}


class CodecCompressor(Compressor):  # type: ignore[misc]
    """What `hvd.DistributedOptimizer` takes as ``compression=``: one codec, or several by policy, and all that they keep.

    Make one for each optimizer, on every rank, in the same order.

    Args:
        codec: A codec or its spec.
        named_parameters: What the optimizer was given, ``model.named_parameters()``.
        min_numel: Smaller parameters, and those with less than two dimensions, stay dense. Codecs that Horovod's own
            allreduce carries out (none, fp16) take all.
        overrides: Specs by name pattern (``{"*.embedding.weight": "none"}``); the first match decides, whatever the size.
        bucket_bytes: So many bytes of gradient travel in one message at most; a larger parameter has its own.
        exchange: "allgather": each rank gets the payloads of all. "scatter-gather": each gets a chunk of the payloads of all,
            and sends their mean, encoded again. "auto": by codec and number of ranks, whichever sends less.
        process_set: The one that the optimizer has.
        seed: Of the random rounding. Ranks and steps differ by themselves.
        grad_scaler: The `torch.amp.GradScaler`, where there is one: residuals follow its scale.
        name: Begins the names of our operations in Horovod's timeline; must be the same on every rank, and no other
            compression's. Default: a number.

    Attributes:
        stats: What was sent, see `hvd_compress.stats.Stats`.

    Raises:
        ValueError: An option is not allowed; the text names it, its value and what is.
    """

    def __init__(
        self,
        codec: str | Codec,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        min_numel: int = 1024,
        overrides: Mapping[str, str | Codec] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        exchange: str = AUTO,
        process_set: Any = hvd.global_process_set,
        seed: int = 0,
        grad_scaler: Any = None,
        name: str | None = None,
    ) -> None:
        if not isinstance(process_set, hvd.ProcessSet):
            raise ValueError(f"process_set={process_set!r} is not allowed; allowed is a horovod.torch.ProcessSet")
        _check_grad_scaler(grad_scaler)
        policy = Policy(parse(codec), min_numel, {} if overrides is None else overrides)
        self._slots = make_slots(named_parameters)
        self._bucket_bytes = bucket_bytes
        self._way = check_exchange(exchange)
        self._seed = check_seed(seed)
        self._grad_scaler = grad_scaler
        self.stats = Stats()
        self._scratch = Scratch()

        set_id = process_set.process_set_id or 0
        number = _made.get(set_id, 0)
        self._exchange = Exchange(check_name(name, f"hvd_compress.{set_id}.{number}"), process_set)
        self._names: dict[int, str] = {}
        self._set_plan(policy)
        _made[set_id] = number + 1
        self._plans = 0  # announced so far
        self._codec_changes: list[int] = []  # after how many steps
        self._warned: set[str] = set()

        self._step = 0  # rounds begun
        self._round: Round | None = None
        self._recent: Slot | None = None  # whose gradient backward has just produced
        self._cursor = 0  # of the search where it was not that one
        self._backward_ran = False  # since the last round's results were handed out
        self._ever_backward = False
        self._optimizers: weakref.WeakKeyDictionary[Any, list[Slot]] = weakref.WeakKeyDictionary()
        _alive.add(self)
        for slot in self._slots:
            weakref.finalize(self, slot.watch(weakref.WeakMethod(self._on_backward)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """It belongs to one optimizer, and its messages may be under way."""
        raise TypeError("a compression cannot be copied or pickled: make another one, and use state_dict()")

    def __str__(self) -> str:
        """The spec."""
        return str(self._plan.policy.codec)

    def __repr__(self) -> str:
        """The spec, with what it is of."""
        return f"<hvd_compress.torch compression {self} of {len(self._slots)} parameters>"

    @property
    def plan(self) -> Plan:
        """Which parameter gets which codec and bucket."""
        return self._plan

    def report(self) -> str:
        """A table for people: of each parameter its codec, what was sent in a step and what is left.

        "sent in" is its message's name in Horovod's timeline, without the compression's.
        """
        names = ["" if s.bucket is None else self._buckets[s.bucket].name for s in self._plan.segments]
        lines = [Line(s.parameter.name, s, name) for s, name in zip(self._plan.segments, names, strict=True)]
        return report(lines, self.stats, self._codec_changes)

    # --- Horovod's two calls

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Encodes a gradient and enqueues its bucket when it is full.

        Args:
            tensor: Any shape, the `.grad` of a parameter that this was made with. Another tensor is left to Horovod as it is.

        Returns:
            What Horovod's allreduce is to send, and what `decompress` needs.

        Raises:
            MismatchError: The ranks do not compress alike.
            ValueError: The tensor is a parameter itself, as under op=Adasum.
        """
        slot = self._find(tensor)
        if slot is None or self._exchange.size == 1:
            return tensor, None
        with torch.no_grad():
            round = self._enter(slot, tensor)
            context = Context(round, slot, tensor, self._is_dense(slot))
            if context.dense:
                return self._dense(context), context
            bucket = self._bucket(context)
            context.late = bucket.arrive(slot, round)
            if not round.repeat:
                self._encoder(context).encode(context)
            if not context.late and bucket.is_full(round):
                self._send(bucket, False, round)
            for transfer in round.transfers.values():
                transfer.advance()
            return round.stand_in.to(tensor.device, copy=True), context

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The mean or sum of a gradient over the ranks, written to the gradient's own memory.

        Args:
            tensor: What Horovod's allreduce made of what `compress` returned.
            ctx: From `compress`.

        Returns:
            The gradient that `compress` was given, which now holds the result.

        Raises:
            PayloadError: A rank's message is damaged.
            RuntimeError: A rank has called hvd.join(), or the gradient was changed since `compress`.
            ValueError: The op is neither Average nor Sum.
        """
        if ctx is None:
            return tensor
        round = ctx.round
        with torch.no_grad():
            self._flush(round)
            if ctx.dense:
                self._finish_dense(ctx, tensor)
            else:
                self._decode(ctx, tensor)
            self._handed_out(ctx)
            ctx.slot.hand_out(ctx.grad)
            round.open -= 1
            if round.open == 0:
                self._close(round)
        return ctx.grad  # type: ignore[no-any-return]

    @property
    def grad_scaler(self) -> Any:
        """The `torch.amp.GradScaler` whose scale residuals follow."""
        return self._grad_scaler

    @grad_scaler.setter
    def grad_scaler(self, grad_scaler: Any) -> None:
        _check_grad_scaler(grad_scaler)
        self._grad_scaler = grad_scaler

    # --- what another kind of compression may do in another way

    def _is_dense(self, slot: Slot) -> bool:
        """Whether Horovod's own allreduce carries the gradient in this round."""
        return slot.segment.bucket is None

    def _momentum(self, slot: Slot, scale: float) -> Momentum | None:
        """What the gradient, which is in units of that loss scale, is averaged with before it is encoded."""
        return None

    def _handed_out(self, context: Context) -> None:
        """The gradient holds the result."""

    def _other_options(self) -> dict[str, Any]:
        """What else ranks must agree on, as plain data by its name."""
        return {}

    # --- a round

    def _enter(self, slot: Slot, tensor: torch.Tensor) -> Round:
        round = self._round
        if round is not None and slot in round.slots and not round.flushed:
            self._drop(round)
        if round is None or slot in round.slots or round.flushed:
            round = self._begin(slot, tensor)
        round.slots.add(slot)
        round.open += 1
        if not round.repeat:
            slot.decide(tensor)
            slot.follow_scale(round.scale)
            slot.residual.round = round
        return round

    def _drop(self, round: Round) -> None:
        """Forgets a round whose results nobody asked for: Horovod dropped it, as its optimizer's load_state_dict() does."""
        if not all(transfer.finish(PLAN_SECONDS) for transfer in round.transfers.values()):
            raise RuntimeError("a step was dropped between backward and optimizer.step() while other ranks still waited for it")
        for slot in round.slots:
            slot.undo(round)

    def _begin(self, slot: Slot, tensor: torch.Tensor) -> Round:
        repeat = self._ever_backward and not self._backward_ran and not slot.stepped and slot.is_result(tensor)
        if repeat:
            self._warn(
                "optimizer.step() or synchronize() was called again without a backward pass since the last synchronize(): the "
                "gradients are left as they are. After synchronize(), call step() inside optimizer.skip_synchronize()."
            )
        if self._round is not None:
            for transfer in self._round.transfers.values():
                transfer.drain()  # its memory is used again
        if self._plan.ranks != self._exchange.size:
            self._names.clear()
            self._set_plan(self._plan.policy)
        self._agree()
        self._step += 1
        scale = 1.0 if self._grad_scaler is None else float(self._grad_scaler.get_scale())
        self._round = Round(self._step, self._exchange, self._plan.digest, repeat, scale)
        for bucket in self._buckets:
            bucket.clear()
        return self._round

    def _flush(self, round: Round) -> None:
        """Sends what no last segment has sent: at the first `decompress`, when every gradient has been handed over."""
        if not round.flushed:
            round.flushed = True
            for bucket in self._buckets:
                for late in bucket.unsent(round):
                    self._send(bucket, late, round)

    def _close(self, round: Round) -> None:
        for bucket in self._buckets:
            bucket.expect(round)
        if self._meter is not None:
            self._measure(self._meter, round)
        self._backward_ran = False
        for slot in round.slots:
            if round.nonfinite:  # on some rank; every rank takes the whole step back
                slot.undo(round)
            round.record.of(slot.name).residual_sq = slot.residual.sq
        self.stats.finish(round.record)

    def _measure(self, meter: _kernels.Meter, round: Round) -> None:
        for (index, late), transfer in round.transfers.items():
            self._buckets[index].seconds[late] = transfer.seconds
            meter.said(2 * index + late, transfer.said)
            meter.sent(2 * index + late, transfer.bytes)
        meter.finish_round()
        self._measured = Measured.of(meter)
        self.stats.network = Network.of(meter)

    # --- encode and decode

    def _dense(self, context: Context) -> torch.Tensor:
        slot, grad = context.slot, context.grad
        if slot.parameter.requires_grad:
            tensor = slot.with_leftover(grad)
        else:
            slot.keep()
            tensor = grad
        wanted = slot.segment.codec.allreduce_dtype
        if wanted == "float16":
            tensor = tensor.to(torch.float16)
        elif tensor.dtype == torch.bfloat16:  # Horovod does not reduce it
            tensor = tensor.to(torch.float32)
        counters = context.round.record.of(slot.name)
        counters.count_reduced(context.round.size, grad.numel() * grad.element_size(), tensor.numel() * tensor.element_size())
        return tensor.contiguous()

    def _finish_dense(self, context: Context, reduced: torch.Tensor) -> None:
        if reduced is not context.grad:
            context.grad.copy_(reduced)
        # GradScaler will skip the step on its account too. Without residuals there is nothing to undo.
        if self._has_residuals and reduced.numel() > 0 and not math.isfinite(torch.linalg.vector_norm(reduced, math.inf)):
            context.round.nonfinite = True

    def _encoder(self, context: Context) -> Encoder:
        """Of the message that the gradient goes into."""
        bucket, round = self._bucket(context), context.round
        key = (bucket.index, context.late)
        if key not in round.encoders:
            writer = bucket.writer(context.late)
            round.encoders[key] = Encoder(writer, self._seed, self._momentum, self._measured)
        return round.encoders[key]

    def _bucket(self, context: Context) -> Bucket:
        assert context.slot.segment.bucket is not None
        return self._buckets[context.slot.segment.bucket]

    def _send(self, bucket: Bucket, late: bool, round: Round) -> None:
        if (bucket.index, late) in round.encoders:
            round.encoders[bucket.index, late].finish()
        bucket.send(late, round, self._measured, lambda messages: self._check(round, messages))

    def _decode(self, context: Context, stand_in: torch.Tensor) -> None:
        slot, round = context.slot, context.round
        counters = round.record.of(slot.name)
        factor, same_plan = StandIn.read(stand_in, round.size, self._plan.digest)
        if not same_plan:
            self._raise_mismatch("another rank has")
        if not round.went_on:  # ranks ask for their results in different orders: waiting for a phase of each would deadlock
            round.went_on = True
            for each in round.transfers.values():
                each.go_on()
        transfer = round.transfers[self._bucket(context).index, context.late]
        received = transfer.wait()
        counters.wait_s, transfer.waited_s = transfer.waited_s, 0.0
        if round.repeat and received.is_repeat:
            return
        if context.sample is not None and not torch.equal(context.sample, sample(context.flat)):  # type: ignore[arg-type]
            raise RuntimeError(
                f"the gradient of {slot.name!r} was changed between backward and synchronize(), which would be lost. Call "
                "optimizer.synchronize() first, then GradScaler.unscale_() or clip_grad_norm_(), then step() inside "
                "optimizer.skip_synchronize()."
            )

        start = time.perf_counter()
        if context.flat is not None and context.flat.dtype == torch.float32:
            total = context.flat
        else:
            total = torch.empty(slot.segment.parameter.numel)
        transfer.decode(slot, factor, vector(total))
        if total is not context.flat:
            context.grad.copy_(slot.unflatten(total))
        counters.decode_s = time.perf_counter() - start

    # --- which parameter, which optimizer

    def _find(self, tensor: torch.Tensor) -> Slot | None:
        """The slot whose gradient that is: by identity, since the order of the calls differs between ranks."""
        recent = self._recent
        if recent is not None and recent.parameter.grad is tensor:
            return recent
        count = len(self._slots)
        for i in range(self._cursor, self._cursor + count):
            if self._slots[i % count].parameter.grad is tensor:
                self._cursor = (i + 1) % count
                return self._slots[i % count]
        if any(slot.parameter is tensor for slot in self._slots):
            raise ValueError(
                "a parameter itself was to be compressed, not its gradient. If it is the optimizer that does so: op=Adasum is "
                "not supported together with hvd_compress; use op=hvd.Average or op=hvd.Sum."
            )
        self._warn(
            f"a tensor of shape {tuple(tensor.shape)} is not the gradient of a parameter that {self} was made with: it is sent "
            "uncompressed. (So are sparse gradients under sparse_as_dense.)"
        )
        return None

    def _on_backward(self, slot: Slot) -> None:
        self._recent = slot
        self._backward_ran = self._ever_backward = True

    def _on_step(self, optimizer: Any) -> None:
        ours = self._optimizers.get(optimizer)
        if ours is None:
            parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
            ours = self._optimizers[optimizer] = [slot for slot in self._slots if id(slot.parameter) in parameters]
        found_inf = getattr(optimizer, "found_inf", None)  # GradScaler lets a fused optimizer skip by itself
        if ours and not (found_inf is not None and float(found_inf) > 0):
            for slot in ours:
                slot.stepped = slot.ever_stepped = True

    def _warn(self, text: str) -> None:
        """Says something once."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=4)

    # --- the plan

    def _set_plan(self, policy: Policy) -> None:
        ranks = self._exchange.size if hvd.is_initialized() else 0
        self._plan = Plan([slot.described for slot in self._slots], policy, self._bucket_bytes, self._way, ranks)
        for slot, segment in zip(self._slots, self._plan.segments, strict=True):
            slot.segment = segment
            slot.piece = (0, 0)
        self._has_residuals = any(s.segment.codec.has_residual or s.residual.value is not None for s in self._slots)
        self._buckets = []
        for i, bucket in enumerate(self._plan.buckets):
            name = self._names.setdefault(i, bucket_name(i, bucket))
            slots = [self._slots[s.index] for s in bucket]
            self._buckets.append(Bucket(i, name, slots, self._exchange, self._plan.digest, self._scratch, self._piece_seed))
        self._meter = _kernels.Meter(self._exchange.network) if any(s.codec.is_measured for s in self._plan.segments) else None
        self._measured = ASSUMED if self._meter is None else Measured.of(self._meter)
        self._announced: Pending | None = None
        self._agreed = False

    def _piece_seed(self, step: int, index: int) -> int:
        ranks, rank = self._exchange.size, self._exchange.rank
        return _kernels.mix_seed(self._seed, ranks + rank, step, index)  # another one than of any rank's own gradient

    def set_codec(self, codec: str | Codec, overrides: Mapping[str, str | Codec] | None = None) -> None:
        """Goes on with another codec from the next step; on every rank alike.

        Residuals are kept, or sent in one step where the new codec has none. `overrides` replaces the ones so far where it
        is given.
        """
        self._between_steps("set_codec()")
        self._codec_changes.append(self.stats.steps)
        old = self._plan.policy
        for slot in self._slots:
            slot.fold(self._exchange.size)
        self._set_plan(Policy(parse(codec), old.min_numel, old.overrides if overrides is None else overrides))

    def _agree(self) -> None:
        """Compares the ranks' plans before the first message of one."""
        if self._agreed:
            return
        if self._announced is None:
            self._announced = self._exchange.allgather_async(
                f"plan.{self._plans}", self._plan.announcement(self._other_options())
            )
            self._plans += 1
            if not self._announced.poll(PLAN_SECONDS):
                self._warn(
                    f"not all {self._exchange.size} ranks of the process set have announced their compression after "
                    f"{PLAN_SECONDS:g} s; going on. {SAME_ON_ALL.format(self._exchange.prefix)}"
                )
        if self._announced.poll():
            compare_announcements(self._announced.wait(), self._exchange.size)
            self._agreed = True

    def _raise_mismatch(self, who: str) -> NoReturn:
        if self._announced is not None and self._announced.poll():
            compare_announcements(self._announced.wait(), self._exchange.size)
        raise MismatchError(
            f"the ranks do not compress alike: {who} another plan than rank {self._exchange.rank} ({self}). Was set_codec() "
            "called on every rank?"
        )

    def _check(self, round: Round, messages: list[Message]) -> None:
        for rank, message in enumerate(messages):
            if message.digest != self._plan.digest:
                self._raise_mismatch(f"rank {rank} has")
            if message.step != round.step:
                raise MismatchError(
                    f"rank {rank} is at step {message.step}, rank {self._exchange.rank} at step {round.step}: was "
                    "load_state_dict() called on every rank, with a state of the same step?"
                )
            if message.flags & Flags.DAMAGED:
                raise PayloadError(f"what rank {rank} received was damaged")
            if message.flags & Flags.NONFINITE:
                round.nonfinite = True

    # --- the state

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, of this rank: save it once per rank.

        Plain data and tensors: the residuals by parameter name, in the parameter's shape (float32), those of the pieces that
        this rank encodes again (first element, and flat), the number of steps, and what they belong to: world size, rank,
        specs.
        """
        self._between_steps("state_dict()")
        residuals = {slot: slot.settled(slot.residual) for slot in self._slots}
        pieces = {slot: slot.settled(slot.piece_residual) for slot in self._slots}
        return {
            **self._identity(),
            "seed": self._seed,
            "step": self._step,
            "stepped": any(slot.ever_stepped for slot in self._slots),
            "scales": {slot.name: slot.scale for slot in self._slots},
            "residuals": {slot.name: slot.unflatten(r).clone() for slot, r in residuals.items() if r is not None},
            "piece_residuals": {slot.name: (slot.piece[0], r.clone()) for slot, r in pieces.items() if r is not None},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Takes up where `state_dict` left off; a resumed run is then bitwise the run that never stopped.

        Args:
            state_dict: Of the same rank, world size, model and specs.
            strict: False: where something of that differs, the residuals start at zero again, and a warning says so.

        Raises:
            ValueError: Something differs, and `strict` is true; the text names it. Or it is no such state.
        """
        self._between_steps("load_state_dict()")
        state.check(state_dict, step=int, stepped=bool, scales=dict, residuals=dict, piece_residuals=dict)
        found = state.difference(self._identity(), state_dict)
        if found is not None:
            if strict:
                raise ValueError(f"the state is of another run: {found}. strict=False restarts the residuals at zero")
            warnings.warn(f"the state is of another run: {found}. The residuals restart at zero.", stacklevel=2)
        residuals, pieces = (state_dict[kind] if found is None else {} for kind in ("residuals", "piece_residuals"))
        for slot in self._slots:
            begin, piece = pieces.get(slot.name, (slot.piece[0], None))
            if piece is not None and (begin, begin + piece.numel()) != slot.piece:
                raise ValueError(
                    f"the state's piece_residual of {slot.name!r} is of elements {begin} to {begin + piece.numel()}, here this "
                    f"rank encodes elements {slot.piece[0]} to {slot.piece[1]} again"
                )
        for slot in self._slots:
            _, piece = pieces.get(slot.name, (0, None))
            slot.set_residuals(residuals.get(slot.name), piece, state_dict["scales"].get(slot.name, 1.0))
            slot.ever_stepped |= state_dict["stepped"]
        self._seed = state_dict["seed"]
        self._step = state_dict["step"]

    def _identity(self) -> dict[str, Any]:
        parameters = {segment.parameter.name: state.described(segment) for segment in self._plan.segments}
        return state.identity(str(self), parameters, self._exchange.size, self._exchange.rank)

    def _between_steps(self, what: str) -> None:
        if self._round is not None and self._round.open:
            raise RuntimeError(f"{what} between backward and optimizer.step(): call it after step()")


def _on_any_step(optimizer: Any, *_: Any) -> None:
    for compressor in list(_alive):
        compressor._on_step(optimizer)


register_optimizer_step_post_hook(_on_any_step)


def _check_grad_scaler(grad_scaler: Any) -> None:
    if grad_scaler is not None and not callable(getattr(grad_scaler, "get_scale", None)):
        raise ValueError(f"grad_scaler={grad_scaler!r} is not allowed; allowed is a torch.amp.GradScaler")
