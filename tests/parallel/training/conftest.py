"""Whole trainings, with three seeds: minutes. Run on two ranks, a framework at a time."""

import pytest


@pytest.fixture(params=[0, 1, 2], ids="seed {}".format)
def seed(request):
    return request.param
