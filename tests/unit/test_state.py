"""Whose a saved state is."""

import numpy as np
import pytest

from hvd_compress import state
from hvd_compress.codecs import parse
from hvd_compress.plan import Parameter, Plan, Policy


def identity(spec="adacomp", shape=(40, 40), world_size=2, rank=0):
    plan = Plan([Parameter("w", shape, "float32")], Policy(parse(spec)), 100)
    return state.identity(str(parse(spec)), {"w": state.described(plan.segments[0])}, world_size, rank)


KINDS = {"step": int, "stepped": bool, "scales": dict, "residuals": dict}


def test_ours():
    assert state.difference(identity(), identity()) is None


@pytest.mark.parametrize(
    ("saved", "text"),
    [
        (identity(world_size=3), "its world size is 3, here it is 2"),
        (identity(rank=1), "its rank is 1, here it is 0"),
        (identity("bf16"), "its spec is 'bf16', here it is 'adacomp:c=2'"),
        (identity(shape=(50, 40)), "parameter 'w' is [[50, 40], 'adacomp:bin=500,c=2', 'allgather'] in it"),
    ],
)
def test_of_another_job(saved, text):
    assert text in state.difference(identity(), saved)


def whole(**changes):
    rest = {"seed": 0, "step": 3, "stepped": True, "scales": {"w": 1.0}, "residuals": {"w": np.zeros((40, 40))}}
    return {**identity(), **rest, **changes}


def test_what_state_dict_gives_is_taken():
    state.check(whole(), **KINDS)


@pytest.mark.parametrize(
    ("saved", "text"),
    [
        (None, "the state is a NoneType"),
        ({}, "the state has format None"),
        (whole(format=1), "the state has format 1"),
        (whole(step="x"), "the state's 'step' is 'x'"),
        (whole(residuals=None), "the state's 'residuals' is None"),
        (whole(residuals={"w": np.zeros(3)}), r"residual of 'w' has shape \[3\], its parameter \[40, 40\]"),
        (whole(residuals={"v": np.zeros(3)}), r"residual of 'v' has shape \[3\], its parameter None"),
        ({"format": state.FORMAT}, "the state's 'world_size' is None"),
    ],
)
def test_what_is_no_state(saved, text):
    with pytest.raises(ValueError, match=text):
        state.check(saved, **KINDS)
