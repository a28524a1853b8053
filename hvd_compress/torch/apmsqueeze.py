"""APMSqueeze for PyTorch: an Adam whose second moment is frozen after a while, and whose momentum is sent compressed."""

from __future__ import annotations

import glob
import math
import warnings
import weakref
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress import apmsqueeze
from hvd_compress.codecs import Codec, parse
from hvd_compress.codecs.base import Momentum
from hvd_compress.plan import Policy
from hvd_compress.torch.compressor import CodecCompressor
from hvd_compress.torch.memory import sample, vector
from hvd_compress.torch.round import Context
from hvd_compress.torch.slot import Slot


class APMSqueeze(torch.optim.Optimizer):
    """APMSqueeze (Tang et al., arXiv 2008.11343, algorithm 1), the first 1-bit Adam.

    Hand it to `hvd.DistributedOptimizer` together with its `compression`::

        optimizer = APMSqueeze(model.named_parameters(), lr=1e-3, freeze_step=0.15, total_steps=100_000)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=optimizer.compression
        )

    Until `freeze_step` it is Adam without bias correction, with dense gradients. From then on the second moment V stays as it
    is, and each rank sends ``beta1 * m + (1 - beta1) * gradient``, compressed, with a residual; m is replaced by the mean of
    what was sent, which is what `.grad` holds after `synchronize()`: clipping acts on it. Where V is 0, in rows of an embedding
    that had no gradient so far, nothing moves, and no coordinate moves further than it could under Adam. One process, or a
    parameter that is not compressed, keeps its exact momentum.

    Args:
        params: ``model.named_parameters()``, or parameters, or groups of either.
        lr: Step size.
        betas: Decay of the momentum and of the second moment.
        eps: Added to the square root of the second moment.
        weight_decay: Decoupled, as AdamW's: before each step parameters shrink by ``lr * weight_decay``.
        freeze_step: After how many steps the second moment is frozen: a number, a fraction of `total_steps` (0.15 in the
            paper), or "auto": when its norm has changed by less than 4 % in the last ``1 / (1 - beta2)`` steps. Ranks agree.
        total_steps: Of the whole training; needed for a fraction alone.
        freeze: False, in a group of its own: its parameters (norms, embeddings) stay dense, with the full Adam.
        codec: What compresses the momentum, a codec or its spec; "l2" and "l1": the sign and this scale.
        options: Of the compression, see `CodecCompressor`: min_numel, overrides, exchange, grad_scaler and so on.

    Raises:
        ValueError: An option is not allowed; the text names it, its value and what is.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: float | str = apmsqueeze.AUTO,
        total_steps: int | None = None,
        freeze: bool = True,
        codec: str | Codec = "l2",
        **options: Any,
    ) -> None:
        # Horovod makes another one of the groups alone: they hold all that a step needs.
        apmsqueeze.check_options(options, CodecCompressor)
        apmsqueeze.codec_of(codec)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "freeze": freeze}
        defaults["freeze_step"] = apmsqueeze.freeze_step(freeze_step, total_steps)
        self._codec = codec
        self._options = options
        self._handed: Any = None  # Horovod's, or made here
        self._seen_frozen: set[int] = set()  # ids of parameters that have made a step since
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.add_param_group`. A group that is added later begins with its own first stage."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for option in ("lr", "eps", "weight_decay"):
            apmsqueeze.check_number(option, group[option])
        betas, freeze = group["betas"], group["freeze"]
        if not (isinstance(betas, (tuple, list)) and len(betas) == 2):
            raise ValueError(f"betas={betas!r} is not allowed; allowed are two numbers from 0 to below 1")
        for place, beta in enumerate(betas):
            apmsqueeze.check_beta(f"betas[{place}]", beta)
        if not isinstance(freeze, bool):
            raise ValueError(f"freeze={freeze!r} is not allowed; allowed is True or False")
        group["freeze_step"] = apmsqueeze.freeze_step(group["freeze_step"])
        if group.get("step", 0) > 0:
            warnings.warn(
                f"a parameter group comes with {group['step']} steps, but without its momenta: they begin at zero, and so does "
                "its first stage. Horovod makes a new optimizer of the groups alone: call load_state_dict() on that, after "
                "hvd.DistributedOptimizer(...).",
                stacklevel=2,
            )
            group.update(step=0, frozen=False, norms=[])
        group.setdefault("step", 0)
        group.setdefault("frozen", False)
        group.setdefault("norms", [])
        # At once, since Horovod makes the state of an optimizer that has none by a step on zeros.
        for p in group["params"]:
            dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
            for name in ("exp_avg", "exp_avg_sq"):
                self.state[p][name] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)

    # --- the compression

    @property
    def compression(self) -> Any:
        """What to pass to `hvd.DistributedOptimizer` as ``compression=``."""
        if self._handed is None:
            self._handed = MomentumCompressor(apmsqueeze.codec_of(self._codec), self, **self._options)
        return self._handed

    @property
    def _compression(self) -> Any:
        return self._handed

    @_compression.setter
    def _compression(self, compression: Any) -> None:
        """Horovod's optimizer tells itself here what compresses its gradients."""
        self._handed = compression
        if isinstance(compression, MomentumCompressor):
            compression.attach(self)

    # --- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on every parameter that has a `.grad`; see `torch.optim.Optimizer.step`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, group)
            if group["freeze"] and not group["frozen"]:
                group["frozen"] = self._is_time_to_freeze(group)
                if group["frozen"] and not isinstance(self._handed, (MomentumCompressor, NoneType)) and hvd.size() > 1:
                    warnings.warn(
                        "the momentum stays uncompressed: hvd.DistributedOptimizer was given another compression. Pass "
                        "compression=optimizer.compression, of this optimizer.",
                        stacklevel=2,
                    )
        return loss

    def _step(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        if p.grad is None or p.grad.is_sparse:
            raise ValueError("APMSqueeze takes dense gradients; make the embedding with sparse=False")
        state, (beta1, beta2), lr = self.state[p], group["betas"], group["lr"]
        m, v = state["exp_avg"], state["exp_avg_sq"]
        grad = p.grad.to(m.dtype)
        if group["frozen"] and id(p) not in self._seen_frozen:
            self._seen_frozen.add(id(p))
            self._check_second_moment(p, group)
        if isinstance(self._handed, MomentumCompressor) and self._handed.is_momentum(p):
            self._handed.check_scale(p)
            m.copy_(grad)
        else:
            m.lerp_(grad, 1 - beta1)
        if not group["frozen"]:
            v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if group["weight_decay"] != 0:
            p.mul_(1 - lr * group["weight_decay"])
        change = m / v.sqrt().add_(group["eps"])
        if group["frozen"]:
            bound = apmsqueeze.largest_change(beta1, beta2)
            change.clamp_(-bound, bound).masked_fill_(v == 0, 0)
        p.add_(change.to(p.dtype), alpha=-lr)

    def _check_second_moment(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        if not self.state[p]["exp_avg_sq"].any() and p.grad is not None and p.grad.any():
            place = next(i for i, each in enumerate(group["params"]) if each is p)
            name = list(_names(self.param_groups.index(group), group))[place]
            warnings.warn(
                f"{name!r} has a gradient for the first time, after the second moment was frozen: it does not move. Give it a "
                "group of its own with freeze=False, or freeze later.",
                stacklevel=4,
            )

    def _is_time_to_freeze(self, group: dict[str, Any]) -> bool:
        if group["freeze_step"] != apmsqueeze.AUTO:
            return bool(group["step"] >= group["freeze_step"])
        beta2 = group["betas"][1]
        if group["step"] % apmsqueeze.check_interval(beta2) != 0:
            return False
        norms = [torch.linalg.vector_norm(self.state[p]["exp_avg_sq"], 1, dtype=torch.float64) for p in group["params"]]
        horizon = apmsqueeze.horizon(beta2)
        group["norms"] = [*group["norms"], float(sum(norm.item() for norm in norms))][-horizon - 1 :]
        stable = len(group["norms"]) > horizon and apmsqueeze.is_stable(group["norms"][-1], group["norms"][0])
        if isinstance(self._handed, MomentumCompressor):
            stable = self._handed.agree(stable)
        if stable:
            group["norms"] = []
        return stable

    # --- the state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.load_state_dict`; an Adam's state begins the first stage where Adam was.

        The residuals are the compression's: see its own.
        """
        before = self.param_groups
        super().load_state_dict(state_dict)
        for group, own in zip(self.param_groups, before, strict=True):
            steps = [float(self.state[p].pop("step", 0)) for p in group["params"]]
            for option, value in {**own, "step": round(max(steps, default=0)), "frozen": False, "norms": []}.items():
                group.setdefault(option, value)
        saved_groups = state_dict["param_groups"]
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            for p, number in zip(group["params"], saved["params"], strict=True):
                # PyTorch has cast them to the parameter's dtype.
                for name in ("exp_avg", "exp_avg_sq"):
                    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
                    saved_moment = state_dict["state"].get(number, {}).get(name)  # Adam has none of what had no gradient
                    moment = torch.zeros_like(p) if saved_moment is None else saved_moment
                    self.state[p][name] = moment.to(p.device, dtype, copy=True)


class MomentumCompressor(CodecCompressor):
    """`CodecCompressor` for an `APMSqueeze`: dense until its groups are frozen, and then of the momentum.

    Args:
        codec: A codec or its spec.
        optimizer: Which it is of.
        options: See `CodecCompressor`.
    """

    def __init__(self, codec: str | Codec, optimizer: APMSqueeze, **options: Any) -> None:
        groups = optimizer.param_groups
        named = [
            (name, p, group["freeze"])
            for number, group in enumerate(groups)
            for name, p in zip(_names(number, group), group["params"], strict=True)
        ]
        overrides = {glob.escape(name): "none" for name, _, freeze in named if not freeze}
        options["overrides"] = {**overrides, **(options.get("overrides") or {})}
        super().__init__(codec, [(name, p) for name, p, _ in named], **options)
        self._group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        self._attached: weakref.ref[APMSqueeze] | None = None
        self._momenta: set[int] = set()  # ids of parameters, which the slots keep alive
        self._samples: dict[int, torch.Tensor] = {}  # of what was handed out, by the same

    def attach(self, optimizer: APMSqueeze) -> None:
        """Notes the optimizer that Horovod has made."""
        self._attached = weakref.ref(optimizer)

    def is_momentum(self, parameter: torch.Tensor) -> bool:
        """Whether the last round has made the parameter's gradient the momentum."""
        return id(parameter) in self._momenta

    def agree(self, stable: bool) -> bool:
        """Whether that is so on every rank."""
        if self._exchange.size <= 1:
            return stable
        name = f"{self._exchange.prefix}.freeze"
        votes = hvd.allreduce(torch.tensor([float(stable)]), op=hvd.Sum, name=name, process_set=self._exchange.process_set)
        return bool(votes.item() > self._exchange.size - 0.5)

    def _set_plan(self, policy: Policy) -> None:
        apmsqueeze.check_codecs([policy.codec, *(parse(codec) for codec in policy.overrides.values())])
        super()._set_plan(policy)

    def _is_dense(self, slot: Slot) -> bool:
        return super()._is_dense(slot) or not self._group(slot)["frozen"]

    def _momentum(self, slot: Slot, scale: float) -> Momentum:
        optimizer, group = self._optimizer, self._group(slot)
        beta1 = group["betas"][0]
        m, _ = slot.flatten(optimizer.state[slot.parameter]["exp_avg"])
        ranks = self._exchange.size if getattr(optimizer, "op", hvd.Average) == hvd.Sum else 1
        return Momentum(vector(m.to(torch.float32)), beta1 * scale / ranks, 1 - beta1)

    def _handed_out(self, context: Context) -> None:
        key = id(context.slot.parameter)
        (self._momenta.discard if context.dense else self._momenta.add)(key)
        if self.grad_scaler is None and not context.dense and context.grad.is_contiguous():
            self._samples[key] = sample(context.grad.view(-1)).clone()

    def check_scale(self, parameter: torch.Tensor) -> None:
        """Raises RuntimeError where what was handed out was divided by a loss scale that is not known here.

        The momentum would be averaged with gradients of another scale from then on.
        """
        handed = self._samples.pop(id(parameter), None)
        if handed is None or parameter.grad is None or not parameter.grad.is_contiguous():
            return
        now = sample(parameter.grad.view(-1))
        ratio = (handed / now)[(handed != 0) & (now != 0)].to(torch.float64)
        if ratio.numel() > 0 and bool((ratio == ratio[0]).all()) and ratio[0] >= 4 and math.frexp(ratio[0].item())[0] == 0.5:
            raise RuntimeError(
                f"the momentum was divided by {ratio[0].item():g} between synchronize() and step(), as GradScaler.unscale_() "
                "does: pass grad_scaler= to APMSqueeze, so that it is averaged with gradients of the same scale"
            )

    def _other_options(self) -> dict[str, Any]:
        groups = self._optimizer.param_groups
        return {option: [group[option] for group in groups] for option in ("freeze_step", "betas")}

    @property
    def _optimizer(self) -> APMSqueeze:
        optimizer = None if self._attached is None else self._attached()
        if optimizer is None:
            raise RuntimeError(
                "this compression is of an APMSqueeze: hand both, the optimizer and compression=optimizer.compression, to "
                "hvd.DistributedOptimizer"
            )
        return optimizer

    def _group(self, slot: Slot) -> dict[str, Any]:
        return self._optimizer.param_groups[self._group_of[id(slot.parameter)]]


def _names(number: int, group: dict[str, Any]) -> Iterable[str]:
    return group.get("param_names") or [f"group{number}.{place}" for place in range(len(group["params"]))]
