"""Whose a saved state is."""

import pytest

from hvd_compress import state
from hvd_compress.codecs import parse
from hvd_compress.plan import Parameter, Plan, Policy


def identity(spec="adacomp", shape=(40, 40), world_size=2, rank=0):
    plan = Plan([Parameter("w", shape, "float32")], Policy(parse(spec)), 100)
    return state.identity(plan, world_size, rank)


def test_ours():
    assert state.difference(identity(), identity()) is None


@pytest.mark.parametrize(
    ("saved", "text"),
    [
        (identity(world_size=3), "its world size is 3, here it is 2"),
        (identity(rank=1), "its rank is 1, here it is 0"),
        (identity("bf16"), "its spec is 'bf16', here it is 'adacomp:c=2'"),
        (identity(shape=(50, 40)), "parameter 'w' is [[50, 40], 'adacomp:bin=500,c=2'] in it"),
    ],
)
def test_of_another_job(saved, text):
    assert text in state.difference(identity(), saved)


@pytest.mark.parametrize("saved", [{}, {**identity(), "format": 2}])
def test_of_another_format(saved):
    with pytest.raises(ValueError, match="the state has format"):
        state.difference(identity(), saved)
