"""A round, from the first `compress` of a step to its last `decompress`."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from hvd_compress.stats import Record
from hvd_compress.torch.exchange import Exchange, StandIn
from hvd_compress.torch.slot import Slot
from hvd_compress.torch.transfer import Transfer

if TYPE_CHECKING:
    from hvd_compress.torch.encoder import Encoder


class Round:
    """What one step has so far."""

    def __init__(self, step: int, exchange: Exchange, digest: int, repeat: bool, scale: float) -> None:
        self.step = step
        self.size, self.rank = exchange.size, exchange.rank
        self.stand_in = StandIn.make(self.rank, self.size, digest)
        self.scale = scale  # of the loss
        self.repeat = repeat  # there is no new gradient since the round before
        self.slots: set[Slot] = set()
        self.open = 0  # contexts that were not decompressed yet
        self.flushed = False  # all messages were sent
        self.went_on = False  # all are in their last phase
        self.nonfinite = False
        self.came: defaultdict[int, set[Slot]] = defaultdict(set)  # by bucket
        self.transfers: dict[tuple[int, bool], Transfer] = {}  # by bucket, and whether of its late segments
        self.encoders: dict[tuple[int, bool], Encoder] = {}  # of the same
        self.record = Record()


class Context:
    """What `decompress` needs of one `compress`."""

    def __init__(self, round: Round, slot: Slot, grad: torch.Tensor, dense: bool) -> None:
        self.round = round
        self.dense = dense  # Horovod's own allreduce carries it
        self.slot = slot
        self.grad = grad
        self.flat: torch.Tensor | None = None  # the gradient's own memory, where it can be written to in order
        self.sample: torch.Tensor | None = None  # of it, in one segment of each message, to notice that it was changed
        self.late = False
