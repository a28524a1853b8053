"""PyTorch's side of ../conftest.py. Every test runs twice: with each exchange, whichever "auto" would choose."""

import helpers
import horovod.torch as hvd
import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _horovod():
    torch.set_num_threads(1)
    hvd.init()


@pytest.fixture(autouse=True)
def _same_start(_horovod):
    torch.manual_seed(1)


@pytest.fixture(autouse=True, params=["allgather", "scatter-gather"])
def exchange(request, monkeypatch):
    monkeypatch.setattr(helpers, "EXCHANGE", request.param)
    return request.param


@pytest.fixture(scope="session")
def ranks(_horovod):
    return hvd.size()
