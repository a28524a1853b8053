"""A cluster of network namespaces: what the network cards count, and that nothing is left of it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("horovod.torch", reason="needs Horovod built against PyTorch")

BENCH = [sys.executable, "-m", "hvd_compress.bench"]
PROBE = f"hc{os.getpid()}probe"


def can_make_namespaces():
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare", "mpirun"))):
        return False
    made = subprocess.run(["ip", "netns", "add", PROBE], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", PROBE], capture_output=True, check=False)
    return made


needs_namespaces = pytest.mark.skipif(
    not can_make_namespaces(), reason="needs root, Linux' network namespaces, iproute2, unshare and Open MPI"
)


@needs_namespaces
@pytest.mark.parametrize("hosts", [2, 3, 4])
def test_traffic_of_a_scatter_gather_does_not_grow_with_the_number_of_ranks(hosts, tmp_path):
    """Bytes by the network cards' counters: 2 (n - 1) / n of a bit an element; and dense, at least 32 times that."""
    elements = 8_000_003
    options = ["--elements", str(elements), "--tensors", "1", "--codec", "onebit", "--repetitions", "2"]
    exchange = ["exchange", *options, "--exchange", "scatter-gather", "--json", str(tmp_path / "rows.json")]
    subprocess.run([*BENCH, "cluster", "--hosts", str(hosts), "--", *exchange], check=True, timeout=100)
    rows = {row["codec"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    share = 2 * (hosts - 1) / hosts
    assert rows["onebit"]["bytes_card"] == pytest.approx(share * elements / 8, rel=0.05)
    assert rows["onebit"]["bytes_sent"] == pytest.approx(rows["onebit"]["bytes_card"], rel=0.05)
    assert rows["none"]["bytes_card"] > 0.95 * share * elements * 4  # what a ring sends; Open MPI does not always take one
    assert rows["onebit"]["exchange"] == "scatter-gather"


@needs_namespaces
def test_cat_measures_the_rate_of_the_cards(tmp_path):
    """Two hosts: each sends its message at the card's rate while it receives the other's.

    A card may send 32 KiB at once, which takes 2.6 ms off what looks like a latency: it may be found to be nothing.
    """
    options = ["--elements", "1000000", "--repetitions", "16", "--codec", "cat", "--json", str(tmp_path / "rows.json")]
    command = [*BENCH, "cluster", "--hosts", "2", "--rate", "100mbit", "--", "exchange", *options]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    row = {row["codec"]: row for row in json.loads((tmp_path / "rows.json").read_text())}["cat"]
    assert row["bandwidth"] == pytest.approx(100e6 / 8, rel=0.3)
    assert row["latency_s"] < 0.1
    assert 100 < row["selected"] < 500_000


def left_of(pid):
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    return [line for line in (namespaces + links).splitlines() if f"hc{pid}" in line]


@needs_namespaces
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_it_is_killed(how, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [*BENCH, "cluster", "--hosts", "2", "--rate", "1mbit", "--", "exchange", "--elements", "10000000"]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # where the tests run in the background it is ignored
    ) as running:
        deadline = time.monotonic() + 60
        while not any("python" in name for name in processes_in(running.pid)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert left_of(running.pid)
        assert list(tmp_path.iterdir())
        running.send_signal(how)
        try:
            running.wait(60)
        finally:
            running.kill()
    deadline = time.monotonic() + 30
    while (left_of(running.pid) or list(tmp_path.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left_of(running.pid)
    assert not list(tmp_path.iterdir())


def processes_in(pid):
    found = subprocess.run(["ip", "netns", "pids", f"hc{pid}h2"], capture_output=True, text=True, check=False).stdout.split()
    return [path.read_text() for path in (Path("/proc", each, "comm") for each in found) if path.exists()]


@needs_namespaces
def test_the_status_of_the_command_is_its_own():
    done = subprocess.run(
        [*BENCH, "cluster", "--hosts", "2", "--", "exchange", "--card", "no"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "--card no: there is no such network card" in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tensors", "0"], "--tensors 0 is not allowed; allowed is a whole number from 1 on"),
        (["--elements", "10", "--tensors", "3"], "--elements 10 cannot be divided into --tensors 3 of one size"),
        (["--codec", "twobit"], "twobit"),
        (["--exchange", "ring"], "exchange='ring' is not allowed"),
        (["--bucket-bytes", "0"], "bucket_bytes=0 is not allowed"),
    ],
)
def test_options_of_an_exchange_that_are_not_allowed(arguments, text):
    done = subprocess.run([*BENCH, "exchange", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert text in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--hosts", "0", "--", "exchange"], "--hosts 0 is not allowed; allowed is a number from 1 to 250"),
        (["--rate", "0mbit", "--", "exchange"], "--rate 0mbit is not allowed"),
        (["--rate", "fast", "--", "exchange"], "--rate fast is not allowed; allowed is a rate such as 100mbit or 1gbit"),
        ([], "no command was given; for example: cluster --hosts 4 --rate 1gbit -- exchange"),
    ],
)
def test_options_that_are_not_allowed(arguments, text):
    done = subprocess.run([*BENCH, "cluster", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert text in done.stderr
