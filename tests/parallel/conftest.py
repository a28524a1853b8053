"""Every rank runs every test here: horovodrun -np 2 python -m pytest -x --capture=sys tests/parallel/pytorch.

PyTorch and TensorFlow each have a folder and a run of their own: each has its own Horovod in a process. Rank 0 reports; the
others speak only of what failed. A test that takes too long ends its process, and with it all ranks.
"""

import faulthandler
import os
import sys

import pytest
from parallel.common import rank

SECONDS = 120


@pytest.hookimpl(trylast=True)  # once there is a terminal reporter
def pytest_configure(config):
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    if rank() > 0:
        config.pluginmanager.unregister(config.pluginmanager.getplugin("terminalreporter"))


def pytest_runtest_logreport(report):
    if report.failed and rank() > 0:
        sys.stderr.write(f"rank {rank()}: {report.nodeid} failed\n{report.longreprtext}\n")


@pytest.fixture(autouse=True)
def _time_out():
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


def pytest_sessionfinish(session, exitstatus):
    if exitstatus != 0:
        # The other ranks may wait for this one in a collective: no orderly shutdown.
        sys.stdout.flush()
        sys.stderr.flush()
        if rank() > 0:
            os._exit(int(exitstatus))
