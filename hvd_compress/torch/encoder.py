"""Encodes gradients into their buckets' messages: each as it comes, or all that share a scope when the last one has come."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hvd_compress import _kernels
from hvd_compress.codecs import Encoded
from hvd_compress.codecs.base import CodecScope, Measured, Momentum
from hvd_compress.exchange import SCATTER_GATHER
from hvd_compress.message import Flags, MessageWriter
from hvd_compress.torch.memory import sample
from hvd_compress.torch.round import Context
from hvd_compress.torch.slot import Slot

MomentumOf = Callable[[Slot, float], Momentum | None]
"""What the gradient of a slot, in units of that loss scale, is averaged with before it is encoded."""


class Encoder:
    """What one message of a round is made of.

    Args:
        writer: Of the message.
        seed: Of the compression.
        momentum_of: See `MomentumOf`.
        measured: What sending costs.
    """

    def __init__(self, writer: MessageWriter, seed: int, momentum_of: MomentumOf, measured: Measured) -> None:
        self._writer = writer
        self._seed = seed
        self._momentum_of = momentum_of
        self._measured = measured
        self._scopes: dict[object, tuple[CodecScope, list[tuple[Context, torch.Tensor]]]] = {}

    def encode(self, context: Context) -> None:
        """Encodes a gradient, or adds it to its scope."""
        slot, round = context.slot, context.round
        start = time.perf_counter()
        codec = slot.segment.codec
        flat, context.flat = slot.flatten(context.grad)
        if not slot.parameter.requires_grad:  # Horovod sends zeros for a frozen one too: its residual must not move it
            slot.keep()
            self._write(context, flat, None)
        elif codec.is_joint:
            scope, members = self._scopes.setdefault(codec, (codec.new_scope(), []))
            slot.survey(scope, flat, self._momentum_of(slot, round.scale))
            members.append((context, flat))
        else:
            momentum = self._momentum_of(slot, round.scale)
            encoded = slot.encode(flat, self._seed_of(context), self._writer.room(), momentum, self._measured)
            self._write(context, flat, encoded)
        round.record.of(slot.name).encode_s += time.perf_counter() - start

    def finish(self) -> None:
        """Encodes what was added to scopes."""
        for scope, members in self._scopes.values():
            start = time.perf_counter()
            scope.choose(self._measured)
            members.sort(key=lambda member: member[0].slot.segment.index)
            for context, flat in members:
                slot = context.slot
                encoded = scope.encode(slot.segment.index, self._seed_of(context), self._writer.room())
                slot.surveyed(encoded)
                self._write(context, flat, encoded)
                now = time.perf_counter()
                context.round.record.of(slot.name).encode_s += now - start
                start = now
        self._scopes.clear()

    def _seed_of(self, context: Context) -> int:
        round, segment = context.round, context.slot.segment
        return _kernels.mix_seed(self._seed, 0 if segment.codec.shares_seed else round.rank, round.step, segment.index)

    def _write(self, context: Context, flat: torch.Tensor, encoded: Encoded | None) -> None:
        """Takes what was written to the message's room; None: nothing."""
        slot, round, writer = context.slot, context.round, self._writer
        counters = round.record.of(slot.name)
        if encoded is not None:
            if writer.segments == 0 and context.flat is not None and encoded.finite:
                context.sample = sample(context.flat).clone()
            if not encoded.finite:
                writer.flags |= Flags.NONFINITE
            counters.count_encoded(encoded)
        message_bytes = writer.add(slot.segment.index, 0 if encoded is None else encoded.bytes)
        grad_bytes = flat.numel() * flat.element_size()
        if slot.segment.exchange == SCATTER_GATHER:
            counters.count_scattered(round.size, grad_bytes, 0)  # the rest is counted when it is sent
        else:
            counters.count_gathered(round.size, grad_bytes, message_bytes)
