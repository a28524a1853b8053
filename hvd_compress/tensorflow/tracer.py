"""Tracing: which variables are compressed together, and whether all ranks do it alike."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_compress import _kernels, state
from hvd_compress.options import PLAN_SECONDS, SAME_ON_ALL
from hvd_compress.plan import MismatchError, Parameter, Plan, Policy, compare_announcements
from hvd_compress.tensorflow.exchange import Exchange, Gathered
from hvd_compress.tensorflow.gradients import Gradients
from hvd_compress.tensorflow.group import Group, StageOf, Traced
from hvd_compress.tensorflow.slot import Slot

_compressions_of: dict[int, tuple[Any, set[int]]] = {}
"""By the id of a variable: a weak reference to it, and the sessions that its gradient has come to."""
_COMPRESSIONS = 3
"""More than two compressions of one variable look like one that is made anew at every step."""


class Tracer:
    """What a compression knows of the graphs that it was traced in.

    Args:
        number: The session's.
        exchange: Of the compression.
        slots: Where to keep what is made for each variable.
        policy: Chooses the codecs.
        bucket_bytes: See `Plan`.
        way: The exchange, see `Plan`.
        grad_scaler: The user's LossScaleOptimizer, or None.
        stage_of: What else decides what is sent.
        announced: What else ranks must agree on, as plain data by its name.
        warn: Says something to the user, once.
    """

    def __init__(
        self,
        number: int,
        exchange: Exchange,
        slots: list[Slot],
        policy: Policy,
        bucket_bytes: int,
        way: str,
        grad_scaler: Any,
        stage_of: StageOf,
        announced: Callable[[], dict[str, Any]],
        warn: Callable[[str], None],
    ) -> None:
        self.policy = policy
        self._number = number
        self._session = _kernels.session(number)
        self._exchange = exchange
        self._slots = slots
        self._by_variable: dict[int, Slot] = {}
        self._bucket_bytes = bucket_bytes
        self._way = way
        self.grad_scaler = grad_scaler
        self._stage_of, self._announced = stage_of, announced
        self._warn = warn
        self._groups: dict[tuple[int, ...], Group] = {}
        self._traced: Traced | None = None
        self._checked: Any = None  # gradients whose variables' names were
        self._restored: dict[str, list[Any]] = {}

    @property
    def groups(self) -> list[Group]:
        """Of variables whose gradients are reduced together."""
        return list(self._groups.values())

    @property
    def plans(self) -> list[Plan]:
        """One for each set of gradients that are reduced together."""
        return [group.plan for group in self._groups.values()]

    @property
    def described(self) -> dict[str, list[Any]]:
        """Shape and codec of each slot, by its place: names may differ between two runs."""
        return {
            str(slot.segment): state.described(segment)
            for group in self._groups.values()
            for slot, segment in zip(group.slots, group.plan.segments, strict=True)
        }

    def check_restored(self, saved: dict[str, list[Any]]) -> None:
        """Raises ValueError where slots are others than in the run that was saved, now or when they are made."""
        self._restored = saved
        for place, here in self.described.items():
            if saved.get(place, here) != here:
                name = self._slots[int(place)].label
                raise ValueError(
                    f"the checkpoint is of another run: {name!r} is {saved[place]} in it, and {here} here. Restored without "
                    "compression=, the residuals start at zero"
                )

    def check_policy(self, found: Gradients) -> None:
        """Raises ValueError where an override names none of the variables; once for gradients that are reduced together."""
        if self._checked is not found.grads:
            self.policy.check(found.names)
            self._checked = found.grads

    def traced(self, found: Gradients) -> Traced:
        """What is traced for these gradients; the first time, all of it."""
        if self._traced is None or self._traced.found is not found.grads:
            self._check(found)
            group = self._group(found)
            self._traced = group.trace(found, self._number, self._exchange, self._scaler(found), self._stage_of)
        return self._traced

    def set_policy(self, policy: Policy) -> None:
        """Goes on with other codecs, in the graphs that are traced already too."""
        refused = [name for group in self._groups.values() for name in group.set_policy(policy, self._session, self._exchange)]
        self.policy = policy
        if refused:
            self._warn(
                f"{refused[0]!r} and {len(refused) - 1} others stay dense: a graph was traced in which Horovod's own allreduce "
                "carries them"
            )

    def _check(self, found: Gradients) -> None:
        if found.op is not None and found.op not in (hvd.Average, hvd.Sum):
            raise ValueError("hvd_compress takes op=hvd.Average and op=hvd.Sum, no other op: what it sends is summed")
        theirs, ours = found.process_set, self._exchange.process_set
        if theirs is not None and theirs.process_set_id != ours.process_set_id:
            raise ValueError(
                f"the optimizer or tape has process_set {theirs.process_set_id}, its compression {ours.process_set_id}: "
                "give both the same"
            )

    def _scaler(self, found: Gradients) -> Any:
        return self.grad_scaler if self.grad_scaler is not None else found.loss_scale_optimizer

    # --- groups and slots

    def _group(self, found: Gradients) -> Group:
        parameters: list[Parameter] = []
        slots: list[Slot] = []
        names = found.names
        for place in found.dense:
            variable = found.variables[place]
            parameter = _parameter(place, names[place], variable, found.grads[place])
            parameters.append(parameter)
            slots.append(self._slot(variable, parameter))
        key = tuple(slot.segment for slot in slots)
        if key not in self._groups:
            group = Group(len(self._groups), slots, functools.partial(self._plan, parameters, names), self.policy)
            self._agree(group)
            self._groups[key] = group
            self.check_restored(self._restored)
        return self._groups[key]

    def _plan(self, parameters: list[Parameter], names: list[str], policy: Policy) -> Plan:
        return Plan(parameters, policy, self._bucket_bytes, self._way, self._exchange.size, names)

    def _slot(self, variable: Any, parameter: Parameter) -> Slot:
        slot = self._by_variable.get(id(variable))
        if slot is not None and slot.is_of(variable):
            return slot
        for slot in self._slots:
            if slot.is_free_for(parameter.name, parameter.shape):
                slot.follow(variable)
                break
        else:
            codec = self.policy.codec_for(parameter)
            segment = self._session.add_segment(codec.kernel, codec.has_residual)
            slot = Slot(parameter.name, variable, parameter.shape, segment)
            self._slots.append(slot)
        self._by_variable[id(variable)] = slot
        self._count_compressions(variable, parameter.name)
        return slot

    def _count_compressions(self, variable: Any, name: str) -> None:
        known = _compressions_of.get(id(variable))
        if known is None or known[0]() is not variable:
            key = id(variable)
            known = _compressions_of[key] = (weakref.ref(variable, lambda _: _compressions_of.pop(key, None)), set())
        known[1].add(self._number)
        if len(known[1]) == _COMPRESSIONS:
            self._warn(
                f"{name!r} has had {_COMPRESSIONS} compressions: one that is made anew at every step is traced anew and "
                "forgets its residuals. Make one for each optimizer, once."
            )

    # --- whether all ranks do alike

    def _agree(self, group: Group) -> None:
        """Compares the ranks' plans before the first message of one."""
        if self._exchange.size <= 1:
            return
        announced = self._exchange.allgather_now(f"plan.{len(self._groups)}", group.plan.announcement(self._announced()))
        if announced.poll(PLAN_SECONDS):
            compare_announcements(announced.wait(), self._exchange.size)
            return
        self._warn(
            f"not all {self._exchange.size} ranks of the process set have announced their compression after {PLAN_SECONDS:g} "
            f"s; going on. {SAME_ON_ALL.format(self._exchange.prefix)}"
        )
        threading.Thread(target=self._agree_later, args=(announced,), daemon=True).start()

    def _agree_later(self, announced: Gathered) -> None:
        try:
            compare_announcements(announced.wait(), self._exchange.size)
        except MismatchError as error:
            self._session.fail(str(error))
        except Exception:  # Horovod has been shut down; the step that waits says so
            return


def _parameter(place: int, name: str, variable: Any, grad: tf.Tensor) -> Parameter:
    """What a plan needs to know; the shape is the variable's, since the gradient's may not be known."""
    shape = variable.shape if isinstance(variable, tf.Variable) else grad.shape
    return Parameter(name, tuple(shape.as_list()), grad.dtype.name, key=f"gradient {place}")
