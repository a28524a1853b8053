"""APMSqueeze's options, and when its first stage ends: what both frameworks' optimizers share.

Tang et al., arXiv 2008.11343. In the first stage training is Adam's, without bias correction. Then the second moment V is
frozen, and what ranks exchange is the momentum, compressed.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from hvd_compress.codecs import BF16, FP16, Codec, Identity, parse

AUTO = "auto"
STABLE = 0.96
"""By what factor the second moment's norm may differ from that of one horizon before, for "auto"."""
_CHECKS = 100
"""So many times in a horizon that is looked at."""
_SCALES = {"l1": "onebit:scale=l1", "l2": "onebit:scale=l2"}


def codec_of(codec: str | Codec) -> Codec:
    """The codec of the optimizers' option: "l2" and "l1" are `onebit` with that scale.

    Raises:
        ValueError: It is no spec.
    """
    return parse(_SCALES.get(codec, codec) if isinstance(codec, str) else codec)


def check_options(options: Mapping[str, Any], compressor: type) -> None:
    """Raises ValueError where the options for a compression have a name that it does not have."""
    if not isinstance(options, Mapping):
        raise ValueError(f"compression_options={options!r} is not allowed; allowed is a dict")
    parameters = inspect.signature(compressor).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise ValueError(f"APMSqueeze: unknown option {option!r}: of the compression there are {', '.join(known)}")


def check_number(name: str, value: Any) -> None:
    """Raises ValueError where an option is no number from 0 on."""
    if not (_is_number(value) and 0 <= value < math.inf):
        raise ValueError(f"{name}={value!r} is not allowed; allowed is a number from 0 on")


def check_beta(name: str, value: Any) -> None:
    """Raises ValueError where an option is no decay."""
    if not (_is_number(value) and 0 <= value < 1):
        raise ValueError(f"{name}={value!r} is not allowed; allowed is a number from 0 to below 1")


def check_codecs(codecs: Iterable[Codec]) -> None:
    """Raises ValueError where one loses more than a rounding, and keeps no residual: d_i and D of the algorithm.

    What such a codec adds to a coordinate is as large as the others are, and is divided by the coordinate's own V: it diverges.
    """
    for codec in codecs:
        if not codec.has_residual and not isinstance(codec, (Identity, FP16, BF16)):
            hint = (
                "; with error_feedback=true it does"
                if any(f.name == "error_feedback" for f in dataclasses.fields(codec))
                else ""
            )
            raise ValueError(f"{codec} keeps no residual, which APMSqueeze needs{hint}")


def freeze_step(freeze_step: Any, total_steps: Any = None) -> int | str:
    """After how many steps V is frozen, or "auto".

    Args:
        freeze_step: A number of steps, a fraction of `total_steps` (the paper: 0.15), or "auto".
        total_steps: Of the whole training.

    Raises:
        ValueError: It is none of them, or a fraction without `total_steps`.
    """
    if total_steps is not None and (isinstance(total_steps, bool) or not isinstance(total_steps, int) or total_steps < 1):
        raise ValueError(f"total_steps={total_steps!r} is not allowed; allowed is a whole number from 1 on")
    if freeze_step == AUTO:
        return AUTO
    if isinstance(freeze_step, float) and 0 < freeze_step < 1:
        if total_steps is None:
            raise ValueError(f"freeze_step={freeze_step!r} is a fraction of total_steps, which was not given")
        return max(1, round(freeze_step * total_steps))
    if isinstance(freeze_step, int) and not isinstance(freeze_step, bool) and freeze_step >= 1:
        return freeze_step
    raise ValueError(
        f"freeze_step={freeze_step!r} is not allowed; allowed is a number of steps from 1 on, a fraction of total_steps "
        f"(0.15), or {AUTO!r}"
    )


def largest_change(beta1: float, beta2: float) -> float:
    """The largest step that Adam without bias correction can make, in units of lr, whatever the gradients were.

    By Cauchy-Schwarz, |m| <= sqrt(v) (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2)). With V frozen that does not hold by
    itself any more: a compressed momentum has no small coordinates, and one of them over a small V would be a step of any size.
    """
    if beta1**2 >= beta2:
        return math.inf
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))


def check_interval(beta2: float) -> int:
    """How many steps lie between two looks at the second moment's norm."""
    return max(1, round(1 / (1 - beta2) / _CHECKS))


def horizon(beta2: float) -> int:
    """How many such looks lie between two norms that are compared: 1 / (1 - beta2) steps."""
    return round(1 / (1 - beta2) / check_interval(beta2))


def is_stable(now: Any, before: Any) -> Any:
    """Whether V may be frozen, by its L1 norms now and one `horizon` before, numbers or tensors of one.

    It must have neither fallen nor, as it does from its start at zero, risen by more than 1 / `STABLE`.
    """
    return (before > 0) & (now >= STABLE * before) & (STABLE * now <= before)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
