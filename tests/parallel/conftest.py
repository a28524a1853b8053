"""Every rank runs every test here: horovodrun -np 2 python -m pytest -x --capture=sys tests/parallel.

Rank 0 reports; the others speak only of what failed. A test that takes too long ends its process, and with it all ranks.
"""

import faulthandler
import os
import sys

import horovod.torch as hvd
import pytest
import torch

SECONDS = 120


@pytest.hookimpl(trylast=True)  # once there is a terminal reporter
def pytest_configure(config):
    torch.set_num_threads(1)
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    hvd.init()
    if hvd.rank() > 0:
        config.pluginmanager.unregister(config.pluginmanager.getplugin("terminalreporter"))


def pytest_runtest_logreport(report):
    if report.failed and hvd.rank() > 0:
        sys.stderr.write(f"rank {hvd.rank()}: {report.nodeid} failed\n{report.longreprtext}\n")


@pytest.fixture(autouse=True)
def _time_out():
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _same_start():
    torch.manual_seed(1)


@pytest.fixture(scope="session")
def ranks():
    return hvd.size()


def pytest_sessionfinish(session, exitstatus):
    if exitstatus != 0:
        # The other ranks may wait for this one in a collective: no orderly shutdown.
        sys.stdout.flush()
        sys.stderr.flush()
        if hvd.rank() > 0:
            os._exit(int(exitstatus))
