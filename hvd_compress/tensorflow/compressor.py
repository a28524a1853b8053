"""The one place that knows how Horovod calls a compressor in TensorFlow.

Horovod calls `compress` and `decompress` while a graph is traced, with one gradient after the other, each inside a tf.cond of
its own (of the grouped ones: of the group's). The first `compress` of a trace finds the gradients that are reduced together
(gradients.py) and adds to their graph what sends all of them: an encode op for each, and for each bucket the allgather of its
message (group.py). What Horovod's own allreduce gets is a stand-in of four elements; `decompress` decodes.

At run time nothing of this is called: the ops keep what a step needs in a session (csrc/session.h).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.compression import Compressor

from hvd_compress import _kernels, state
from hvd_compress.codecs import Codec, parse
from hvd_compress.exchange import AUTO
from hvd_compress.options import BUCKET_BYTES, check_bucket_bytes, check_exchange, check_name, check_seed
from hvd_compress.plan import Plan, Policy
from hvd_compress.report import report
from hvd_compress.stats import Counters, Network, Stats
from hvd_compress.tensorflow import ops
from hvd_compress.tensorflow.exchange import Exchange
from hvd_compress.tensorflow.gradients import Gradients, is_loss_scale_optimizer, reduced_together
from hvd_compress.tensorflow.group import EncodeInputs
from hvd_compress.tensorflow.slot import Slot
from hvd_compress.tensorflow.tracer import Tracer

_made: dict[int, int] = {}


class CodecCompressor(Compressor, tf.Module):  # type: ignore[misc]
    """What Horovod's optimizers and `hvd.DistributedGradientTape` take as ``compression=``.

    Make one for each optimizer, once, on every rank, in the same order. ``tf.train.Checkpoint(compression=...)`` saves what a
    resumed run needs, of this rank: save it once per rank.

    Args:
        codec: A codec or its spec.
        min_numel: Smaller variables, and those with less than two dimensions, stay dense. Codecs that Horovod's own allreduce
            carries out (none, fp16) take all.
        overrides: Specs by name pattern (``{"*/embeddings": "none"}``) of the variables' names; the first match decides,
            whatever the size.
        bucket_bytes: So many bytes of gradient travel in one message at most; a larger variable has its own.
        exchange: "allgather": each rank gets the payloads of all. "scatter-gather": each gets a chunk of the payloads of all,
            and sends their mean, encoded again. "auto": by codec and number of ranks, whichever sends less.
        process_set: The one that the optimizer has.
        seed: Of the random rounding. Ranks and steps differ by themselves.
        grad_scaler: The `LossScaleOptimizer`, where there is one: residuals follow its scale. One whose `minimize` (or
            `model.fit`) asks for the gradients is found without it.
        name: Begins the names of our operations in Horovod's timeline; must be the same on every rank, and no other
            compression's. Default: a number.

    Attributes:
        slots: What is kept of each variable, in the order in which they came.

    Raises:
        ValueError: An option is not allowed; the text names it, its value and what is.
        ImportError: hvd_compress was installed without its TensorFlow ops.
    """

    def __init__(
        self,
        codec: str | Codec,
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
        tf.Module.__init__(self, name="compression")
        if not isinstance(process_set, hvd.ProcessSet):
            raise ValueError(f"process_set={process_set!r} is not allowed; allowed is a horovod.tensorflow.ProcessSet")
        _check_grad_scaler(grad_scaler)
        policy = Policy(parse(codec), min_numel, {} if overrides is None else overrides)
        check_bucket_bytes(bucket_bytes)
        way = check_exchange(exchange)
        number = _kernels.make_session(check_seed(seed))
        ops.library()

        set_id = process_set.process_set_id or 0
        _made[set_id] = _made.get(set_id, 0) + 1
        self._exchange = Exchange(check_name(name, f"hvd_compress.tf.{set_id}.{_made[set_id] - 1}"), process_set)
        self._session = _kernels.session(number)
        self._session.on_warning(_warn)
        self.slots: list[Slot] = []
        self.identity = _Identity(self)
        self._codec_changes: list[int] = []  # after how many steps
        self._tracer = Tracer(
            number,
            self._exchange,
            self.slots,
            policy,
            bucket_bytes,
            way,
            grad_scaler,
            self._stage_of,
            self._other_options,
            self._session.warn,
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """It belongs to one optimizer, and its messages may be under way."""
        raise TypeError("a compression cannot be copied or pickled: make another one, and use tf.train.Checkpoint")

    def __str__(self) -> str:
        """The spec."""
        return str(self._tracer.policy.codec)

    def __repr__(self) -> str:
        """The spec, with what it is of."""
        return f"<hvd_compress.tensorflow compression {self}>"

    @property
    def grad_scaler(self) -> Any:
        """The `LossScaleOptimizer` whose scale residuals follow. Set it before a graph is traced."""
        return self._tracer.grad_scaler

    @grad_scaler.setter
    def grad_scaler(self, grad_scaler: Any) -> None:
        _check_grad_scaler(grad_scaler)
        self._tracer.grad_scaler = grad_scaler

    @property
    def policy(self) -> Policy:
        """What chooses the codecs."""
        return self._tracer.policy

    @property
    def plans(self) -> list[Plan]:
        """Which variable gets which codec and bucket: a plan for each set of gradients that are reduced together."""
        return self._tracer.plans

    # --- Horovod's two calls

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Adds to the graph what encodes and sends a gradient.

        Args:
            tensor: Any shape, a gradient that Horovod's optimizers or tapes reduce. Another tensor is left to Horovod as it is.

        Returns:
            What Horovod's allreduce is to send, and what `decompress` needs.

        Raises:
            MismatchError: The ranks do not compress alike.
            ValueError: The op is neither Average nor Sum, or the optimizer has another process set.
        """
        found = reduced_together(tensor)
        if found is None:
            self._session.warn(
                f"a tensor of shape {tensor.shape} is not a gradient that hvd.DistributedOptimizer or "
                "hvd.DistributedGradientTape reduces: it is sent uncompressed."
            )
            return tensor, None
        if self._exchange.is_alone or found.is_export:
            self._tracer.check_policy(found)
            return tensor, None
        traced = self._tracer.traced(found)
        member = traced.take(tensor)
        return traced.to_reduce(member), (traced, member)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def decompress(self, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Adds to the graph what decodes the mean or sum of a gradient over the ranks.

        In the graph, a message that is damaged, of another plan or of another step is a tf.errors.InvalidArgumentError.

        Args:
            tensor: What Horovod's allreduce made of what `compress` returned.
            ctx: From `compress`.

        Returns:
            The gradient's shape and dtype.
        """
        if ctx is None:
            return tensor
        traced, member = ctx
        return traced.result(member, tensor)

    def _stage_of(self, found: Gradients, world: tf.Tensor, scale: tf.Tensor) -> Callable[[Any], EncodeInputs]:
        """What else decides, in the graph, what is sent of each variable: see `StageOf`."""
        return lambda variable: EncodeInputs()

    def _other_options(self) -> dict[str, Any]:
        """What else ranks must agree on, as plain data by its name."""
        return {}

    # --- what was sent

    @property
    def stats(self) -> Stats:
        """What was sent so far, see `hvd_compress.stats.Stats`: a copy."""
        steps, last, total, of_last = self._session.stats()
        ranks = max(self._exchange.size, 1)
        names = {slot.segment: slot.label for slot in self.slots}
        return Stats.of(
            steps,
            {names[segment]: Counters.of_session(last[segment], ranks) for segment in of_last},
            {name: Counters.of_session(total[segment], ranks) for segment, name in names.items() if total[segment].rounds},
            Network.of(self._session.meter),
        )

    def report(self) -> str:
        """A table for people: of each variable its codec, what was sent in a step and what is left.

        "sent in" is its message's name in Horovod's timeline, without the compression's.
        """
        lines = {line.name: line for group in self._tracer.groups for line in group.lines()}
        return report(lines.values(), self.stats, self._codec_changes)

    def set_codec(self, codec: str | Codec, overrides: Mapping[str, str | Codec] | None = None) -> None:
        """Goes on with another codec from the next step; on every rank alike.

        Residuals are kept, or sent in one step where the new codec has none. `overrides` replaces the ones so far where it
        is given. Graphs that were traced stay as they are: what Horovod's own allreduce carries in them (small variables)
        stays dense, and where the new codec is none or fp16 it is payloads that are gathered.
        """
        old = self._tracer.policy
        self._codec_changes.append(self._session.stats()[0])
        self._tracer.set_policy(Policy(parse(codec), old.min_numel, old.overrides if overrides is None else overrides))

    # --- checkpoints

    def identify(self) -> dict[str, Any]:
        """Whose residuals they are, as plain data; saved with them."""
        identity = state.identity(str(self), self._tracer.described, self._exchange.size, self._exchange.rank)
        return {**identity, "seed": self._session.seed}

    def check_identity(self, saved: dict[str, Any]) -> None:
        """Takes the seed from what `identify` gave of the run that was saved.

        Raises:
            ValueError: The checkpoint is of another rank, world size, model or spec; the text names it.
        """
        state.check(saved)
        self._tracer.check_restored(saved["parameters"])
        found = state.difference({**self.identify(), "parameters": {}}, {**saved, "parameters": {}})
        if found is not None:
            raise ValueError(
                f"the checkpoint is of another run: {found}. Restored without compression=, the residuals start at zero"
            )
        self._session.seed = saved["seed"]


class _Identity(tf.train.experimental.PythonState):  # type: ignore[misc]
    """Saved with the residuals: whose they are."""

    def __init__(self, compressor: CodecCompressor) -> None:
        self._compressor = compressor

    def serialize(self) -> str:
        return json.dumps(self._compressor.identify())

    def deserialize(self, text: str) -> None:
        self._compressor.check_identity(json.loads(text))


def _check_grad_scaler(grad_scaler: Any) -> None:
    if grad_scaler is not None and not is_loss_scale_optimizer(grad_scaler):
        raise ValueError(f"grad_scaler={grad_scaler!r} is not allowed; allowed is a Keras LossScaleOptimizer")


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)
