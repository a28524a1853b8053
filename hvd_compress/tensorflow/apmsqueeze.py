"""APMSqueeze for Keras, and for loops with a tape: see hvd_compress/torch/apmsqueeze.py, which is the same for PyTorch."""

from __future__ import annotations

import fnmatch
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from hvd_compress import apmsqueeze
from hvd_compress.codecs import Codec, parse
from hvd_compress.plan import Policy
from hvd_compress.tensorflow.compressor import CodecCompressor
from hvd_compress.tensorflow.gradients import Gradients
from hvd_compress.tensorflow.group import EncodeInputs

if not hasattr(tf.keras.optimizers.Optimizer, "compute_gradients"):
    raise ImportError(
        "hvd_compress.tensorflow.APMSqueeze is an optimizer of the Keras that Horovod takes, the one before Keras 3: install "
        "tf_keras and set TF_USE_LEGACY_KERAS=1"
    )


class APMSqueeze(tf.keras.optimizers.Optimizer):  # type: ignore[misc]
    """APMSqueeze (Tang et al., arXiv 2008.11343, algorithm 1), the first 1-bit Adam.

    Hand it to Horovod together with its `compression`::

        optimizer = APMSqueeze(1e-3, freeze_step=0.15, total_steps=100_000)
        optimizer = hvd.DistributedOptimizer(optimizer, compression=optimizer.compression)

    or, in a loop of your own, hand `optimizer.compression` to `hvd.DistributedGradientTape`.

    Until `freeze_step` it is Adam without bias correction, with dense gradients. From then on the second moment V stays as it
    is, and each rank sends ``beta_1 * m + (1 - beta_1) * gradient``, compressed, with a residual; m is replaced by the mean of
    what was sent, which is what Horovod hands back as the gradient: clipping acts on it. Where V is 0, in rows of an embedding
    that had no gradient so far, nothing moves, and no coordinate moves further than it could under Adam. One process, or a
    variable that is not compressed, keeps its exact momentum.

    Args:
        learning_rate: Step size, or a `LearningRateSchedule`.
        beta_1: Decay of the momentum.
        beta_2: Decay of the second moment.
        epsilon: Added to the square root of the second moment.
        weight_decay: Decoupled, as AdamW's: before each step variables shrink by ``learning_rate * weight_decay``.
        freeze_step: After how many steps the second moment is frozen: a number, a fraction of `total_steps` (0.15 in the
            paper), or "auto": when its norm has changed by less than 4 % in the last ``1 / (1 - beta_2)`` steps. Ranks agree.
        total_steps: Of the whole training; needed for a fraction alone.
        no_freeze: Name patterns (``["*/embeddings"]``) of variables that stay dense, with the full Adam.
        codec: What compresses the momentum, a codec or its spec; "l2" and "l1": the sign and this scale.
        compression_options: See `CodecCompressor`: min_numel, overrides, exchange, grad_scaler and so on. They are not part
            of the optimizer's config.
        name: The optimizer's.
        keras_options: See `tf.keras.optimizers.Optimizer`: clipnorm, use_ema and so on.

    Raises:
        ValueError: An option is not allowed; the text names it, its value and what is.
    """

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay: float | None = None,
        *,
        freeze_step: float | str = apmsqueeze.AUTO,
        total_steps: int | None = None,
        no_freeze: Sequence[str] = (),
        codec: str | Codec = "l2",
        compression_options: Mapping[str, Any] | None = None,
        name: str = "APMSqueeze",
        **keras_options: Any,
    ) -> None:
        if not isinstance(learning_rate, tf.keras.optimizers.schedules.LearningRateSchedule):
            apmsqueeze.check_number("learning_rate", learning_rate)
        apmsqueeze.check_beta("beta_1", beta_1)
        apmsqueeze.check_beta("beta_2", beta_2)
        apmsqueeze.check_number("epsilon", epsilon)
        if weight_decay is not None:
            apmsqueeze.check_number("weight_decay", weight_decay)
        if isinstance(no_freeze, str) or not all(isinstance(pattern, str) for pattern in no_freeze):
            raise ValueError(f"no_freeze={no_freeze!r} is not allowed; allowed is a list of name patterns")
        apmsqueeze.check_options({} if compression_options is None else compression_options, CodecCompressor)
        super().__init__(name=name, weight_decay=weight_decay, **keras_options)
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.freeze_step = apmsqueeze.freeze_step(freeze_step, total_steps)
        self.no_freeze = tuple(no_freeze)
        self.codec = str(apmsqueeze.codec_of(codec))
        # Neither is part of its checkpoint: residuals are each rank's own.
        self._options = self._no_dependency(dict(compression_options or {}))
        self._handed = self._no_dependency(None)  # to Horovod
        self._compressed: set[str] = set()  # keys of variables
        self._warned = False

    def get_config(self) -> dict[str, Any]:
        """What another one of it is made of."""
        return {
            **super().get_config(),
            "learning_rate": self._serialize_hyperparameter(self._learning_rate),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            "freeze_step": self.freeze_step,
            "no_freeze": list(self.no_freeze),
            "codec": self.codec,
        }

    @property
    def compression(self) -> MomentumCompressor:
        """What to pass to Horovod as ``compression=``."""
        if self._handed is None:
            self.attach(MomentumCompressor(self.codec, self, **self._options))
        compression: MomentumCompressor = self._handed
        return compression

    def attach(self, compression: MomentumCompressor) -> None:
        """Notes the compression that Horovod was given."""
        self._handed = self._no_dependency(compression)

    # --- what is kept

    def build(self, var_list: Iterable[Any]) -> None:
        """See `tf.keras.optimizers.Optimizer.build`. More variables may come later, as of another tape."""
        var_list = list(var_list)
        if not getattr(self, "_built", False):
            super().build([])
            self._momenta: list[tf.Variable] = []
            self._second_moments: list[tf.Variable] = []
            self._freezing: list[tf.Variable] = []  # those of them that are frozen at some time
            self._steps = self._add([], tf.int64, "steps")  # that were made
            self._frozen = self._add([], tf.int32, "frozen")  # 0 or 1, since Horovod broadcasts no bool
            self._norms = self._add([apmsqueeze.horizon(self.beta_2) + 1], tf.float64, "norms")  # the last: now
            self._built = True
        for variable in var_list:
            if self._var_key(variable) in self._index_dict:
                continue
            self._index_dict[self._var_key(variable)] = len(self._momenta)
            dtype = getattr(variable, "true_dtype", variable.dtype)  # that of a variable which Keras casts by itself
            dtype = tf.float64 if dtype == tf.float64 else tf.float32
            self._momenta.append(self._add(variable.shape, dtype, f"m/{_name(variable)}"))
            self._second_moments.append(self._add(variable.shape, dtype, f"v/{_name(variable)}"))
            if self.freezes(variable):
                self._freezing.append(self._second_moments[-1])
            if self.use_ema:
                average = self.add_variable_from_reference(variable, "average", initial_value=variable)
                self._model_variables_moving_average.append(average)

    def _add(self, shape: Sequence[int], dtype: tf.DType, name: str) -> tf.Variable:
        # The class itself: tf.Variable asks the variable creators of a tf.function that is being traced, and they refuse all
        # but its first trace.
        with tf.init_scope():
            variable = ResourceVariable(tf.zeros(shape, dtype), trainable=False, name=name)
        self._variables.append(variable)
        return variable

    def momentum_of(self, variable: Any) -> tf.Variable:
        """Its m, in its shape; float64 if it is, else float32."""
        return self._momenta[self._index_dict[self._var_key(variable)]]

    def freezes(self, variable: Any) -> bool:
        """Whether its V is frozen at some time, and it may be compressed then."""
        return not any(fnmatch.fnmatchcase(_name(variable), pattern) for pattern in self.no_freeze)

    @property
    def is_frozen(self) -> tf.Tensor:
        """Whether V is frozen by now (bool, no dimensions)."""
        return self._frozen > 0

    def note_compressed(self, variable: Any) -> None:
        """From the freeze on its gradient comes back as the momentum."""
        self._compressed.add(self._var_key(variable))

    # --- the step

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def update_step(self, gradient: Any, variable: Any) -> None:
        """One step of one variable; called by Keras."""
        index = self._index_dict[self._var_key(variable)]
        m, v = self._momenta[index], self._second_moments[index]
        gradient = tf.cast(tf.convert_to_tensor(gradient), m.dtype)  # of tf.IndexedSlices too
        lr = tf.cast(self.learning_rate, m.dtype)

        def before() -> None:
            m.assign(m + (1 - self.beta_1) * (gradient - m))
            v.assign(self.beta_2 * v + (1 - self.beta_2) * tf.square(gradient))
            variable.assign_sub(tf.cast(lr * m / (tf.sqrt(v) + self.epsilon), variable.dtype))

        def after() -> None:
            if self._var_key(variable) in self._compressed:
                m.assign(gradient)
            else:
                m.assign(m + (1 - self.beta_1) * (gradient - m))
            bound = apmsqueeze.largest_change(self.beta_1, self.beta_2)
            change = tf.clip_by_value(m / (tf.sqrt(v) + self.epsilon), -bound, bound)
            variable.assign_sub(tf.cast(lr * tf.where(v == 0, tf.zeros_like(change), change), variable.dtype))

        if self.freezes(variable):
            _cond(self.is_frozen, after, before)
        else:
            before()

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any) -> Any:
        """See `tf.keras.optimizers.Optimizer.apply_gradients`."""
        if self._handed is None and hasattr(self, "_allreduce_grads") and hvd.size() > 1 and not self._warned:
            self._warned = True
            warnings.warn(
                "the momentum stays uncompressed: hvd.DistributedOptimizer was given another compression. Pass "
                "compression=optimizer.compression, of this optimizer.",
                stacklevel=2,
            )
        result = super().apply_gradients(grads_and_vars, *args, **kwargs)
        if getattr(self, "_built", False):
            self._steps.assign_add(1)
            _cond(self.is_frozen, lambda: None, self._freeze_in_time)
        return result

    def _freeze_in_time(self) -> None:
        if self.freeze_step == apmsqueeze.AUTO:
            is_time = self._steps % apmsqueeze.check_interval(self.beta_2) == 0
            _cond(is_time, lambda: self._frozen.assign(tf.cast(self._is_stable(), tf.int32)), lambda: None)
        else:
            self._frozen.assign(tf.cast(self._steps >= self.freeze_step, tf.int32))

    def _is_stable(self) -> tf.Tensor:
        """Whether the second moment is, on every rank; notes its norm."""
        norm = tf.add_n([tf.zeros([], tf.float64), *(tf.cast(tf.reduce_sum(v), tf.float64) for v in self._freezing)])
        norms = tf.concat([self._norms[1:], norm[None]], 0)
        self._norms.assign(norms)
        stable = apmsqueeze.is_stable(norms[-1], norms[0])
        return stable if self._handed is None else self._handed.agree(stable)


class MomentumCompressor(CodecCompressor):
    """`CodecCompressor` for an `APMSqueeze`: dense until V is frozen, and then of the momentum.

    Args:
        codec: A codec or its spec.
        optimizer: Which it is of; Horovod makes another one of it, which is found when that asks for its gradients.
        options: See `CodecCompressor`.
    """

    def __init__(self, codec: str | Codec, optimizer: APMSqueeze, **options: Any) -> None:
        options["overrides"] = {**dict.fromkeys(optimizer.no_freeze, "none"), **(options.get("overrides") or {})}
        super().__init__(codec, **options)
        _check_codecs(self.policy)
        self._optimizer = weakref.ref(optimizer)

    def set_codec(self, codec: str | Codec, overrides: Mapping[str, str | Codec] | None = None) -> None:
        """See `CodecCompressor.set_codec`."""
        _check_codecs(Policy(parse(codec), overrides={} if overrides is None else overrides))
        super().set_codec(codec, overrides)

    def _other_options(self) -> dict[str, Any]:
        optimizer = self._optimizer()
        if optimizer is None:
            return {}
        return {option: getattr(optimizer, option) for option in ("freeze_step", "beta_1", "beta_2")}

    def agree(self, stable: tf.Tensor) -> tf.Tensor:
        """Whether that is so on every rank; in the graph."""
        if self._exchange.is_alone:
            return stable
        ranks = tf.cast(self._exchange.world()[1], tf.float32)
        return self._exchange.sum("freeze", tf.cast(stable, tf.float32)) > ranks - 0.5

    def _stage_of(self, found: Gradients, world: tf.Tensor, scale: tf.Tensor) -> Callable[[Any], EncodeInputs]:
        optimizer = self._optimizer_of(found)
        with tf.init_scope():
            optimizer.build(found.variables)
        dense = tf.logical_not(optimizer.is_frozen)
        ranks = tf.cast(world[1], tf.float32) if found.op == hvd.Sum else 1.0
        weights = tf.stack([1 - optimizer.beta_1, optimizer.beta_1 * scale / ranks])

        def inputs_of(variable: Any) -> EncodeInputs:
            if not optimizer.freezes(variable):
                return EncodeInputs(dense=True)
            optimizer.note_compressed(variable)
            return EncodeInputs(dense, weights, [tf.cast(optimizer.momentum_of(variable), tf.float32)])

        return inputs_of

    def _optimizer_of(self, found: Gradients) -> APMSqueeze:
        """That which asks for the gradients; where a tape does, the one that this was made for."""
        for caller in found.callers:
            if isinstance(caller, APMSqueeze):
                self._optimizer = weakref.ref(caller)
                caller.attach(self)
                return caller
            if hasattr(caller, "_allreduce_grads") and hasattr(caller, "apply_gradients"):  # Horovod's
                raise ValueError(
                    f"this compression is of an APMSqueeze, and Horovod's optimizer is of {type(caller).__mro__[1].__name__}: "
                    "hand both, the optimizer and compression=optimizer.compression, to hvd.DistributedOptimizer"
                )
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError("the APMSqueeze that this compression is of is gone: keep it, it makes the steps")
        return optimizer


def _check_codecs(policy: Policy) -> None:
    apmsqueeze.check_codecs([policy.codec, *map(parse, policy.overrides.values())])


def _cond(condition: tf.Tensor, true: Callable[[], Any], false: Callable[[], Any]) -> None:
    """A tf.cond of branches that give nothing."""

    def run(branch: Callable[[], Any]) -> None:
        branch()

    tf.cond(condition, functools.partial(run, true), functools.partial(run, false))


def _name(variable: Any) -> str:
    return str(variable.name).split(":")[0]
