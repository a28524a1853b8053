"""Runs a benchmark on a cluster of hosts on this machine, one process on each, with network cards of a limited rate.

``python -m hvd_compress.bench cluster --hosts 4 --rate 1gbit -- exchange --codec onebit``

Hosts are network namespaces with a host name and an address of their own, on one bridge. Their cards are limited in both
directions, and count what they send. This needs Linux, root, iproute2 (ip, tc), util-linux (unshare), hostname and Open MPI.
All is removed when it ends, also when it is killed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from hvd_compress.bench.network import CARD, RATE, bits_of

_NEEDED = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "hostname": "hostname", "mpirun": "Open MPI"}

_AGENT = """#!/bin/sh
# What mpirun takes instead of ssh: agent [options] 10.77.0.N command...
while [ "${1#-}" != "$1" ]; do shift; done
number=${1##*.}
shift
exec ip netns exec "@PREFIX@h$number" unshare --uts sh -c "hostname @PREFIX@h$number; $*"
"""

_KEEPER = """
trap '' HUP INT TERM
cat >/dev/null  # until the benchmark closes the pipe, or is gone
quiet=0
while [ $quiet -lt 3 ]; do  # one that is being started on one host by another, which was killed already, is found later
  quiet=$((quiet + 1))
  for host in @HOSTS@; do
    pids=$(ip netns pids $host)
    [ -z "$pids" ] || { kill -9 $pids; quiet=0; }
  done
  sleep 0.1
done
for host in @HOSTS@; do ip netns del $host; done
ip link del @PREFIX@b
rm -r @FOLDER@
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--hosts", type=int, default=4, help="how many (default: %(default)s)")
    parser.add_argument("--rate", metavar="RATE", help="of each card, as 100mbit or 1gbit (default: no limit)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="of python -m hvd_compress.bench")


def run(arguments: argparse.Namespace) -> None:
    """Makes the cluster, runs the command on it and ends with its status."""
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise SystemExit("cluster: no command was given; for example: cluster --hosts 4 --rate 1gbit -- exchange")
    with Cluster(arguments.hosts, arguments.rate) as cluster:
        raise SystemExit(cluster.run([sys.executable, "-m", "hvd_compress.bench", *command]))


class Cluster:
    """Hosts 10.77.0.1 and so on; a context manager, which has them within.

    Args:
        hosts: How many, 1 to 250.
        rate: Of each card in both directions, as tc takes it ("1gbit"), or None.

    Raises:
        SystemExit: An option is not allowed, or something is missing on this machine; the text says what.
    """

    def __init__(self, hosts: int, rate: str | None) -> None:
        if not 1 <= hosts <= 250:
            raise SystemExit(f"--hosts {hosts} is not allowed; allowed is a number from 1 to 250")
        try:
            bits_of(rate or "1gbit")
        except ValueError as error:
            raise SystemExit(f"--rate {error}") from None
        missing = [f"{program} ({package})" for program, package in _NEEDED.items() if shutil.which(program) is None]
        if missing:
            raise SystemExit(f"cluster: needs {', '.join(missing)}")
        if os.geteuid() != 0:
            raise SystemExit("cluster: needs root, to make network namespaces")
        self._hosts, self._rate = hosts, rate
        self._prefix = f"hc{os.getpid()}"
        self._names = [f"{self._prefix}h{number}" for number in range(1, hosts + 1)]

    def __enter__(self) -> Cluster:
        self._folder = Path(tempfile.mkdtemp(prefix="hvd_compress_cluster_"))
        self._agent = self._folder / "agent"
        self._agent.write_text(_AGENT.replace("@PREFIX@", self._prefix))
        self._agent.chmod(0o700)
        self._keeper = self._start_keeper()
        try:
            _ip(f"link add {self._prefix}b type bridge")
            _ip(f"link set {self._prefix}b up")
            for number, name in enumerate(self._names, start=1):
                self._add_host(number, name)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._keeper.communicate()

    def _start_keeper(self) -> subprocess.Popen[bytes]:
        """A process that outlives this one, whatever happens to it, and removes what is left."""
        script = _KEEPER.replace("@HOSTS@", " ".join(self._names)).replace("@PREFIX@", self._prefix)
        script = script.replace("@FOLDER@", shlex.quote(str(self._folder)))
        return subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)

    def _add_host(self, number: int, name: str) -> None:
        outer = f"{self._prefix}v{number}"
        _ip(f"netns add {name}")
        _ip(f"link add {outer} type veth peer name eth0 netns {name}")
        _ip(f"link set {outer} master {self._prefix}b up")
        _ip(f"-n {name} addr add 10.77.0.{number}/24 dev eth0")
        _ip(f"-n {name} link set eth0 up")
        _ip(f"-n {name} link set lo up")
        if self._rate is not None:
            limit = f"root tbf rate {self._rate} burst {_burst(self._rate)} latency 50ms"
            _call(["tc", "qdisc", "add", "dev", outer, *limit.split()])
            _ip(f"netns exec {name} tc qdisc add dev eth0 {limit}")

    def run(self, command: list[str]) -> int:
        """Runs a command on every host, as a rank of MPI each; returns its exit status."""
        addresses = ",".join(f"10.77.0.{number}:1" for number in range(1, self._hosts + 1))
        mpirun = (
            f"mpirun --allow-run-as-root --bind-to none -np {self._hosts} -H {addresses} "
            "--mca plm_rsh_no_tree_spawn 1 --mca btl tcp,self --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 "
            "--mca mpi_yield_when_idle 1 --mca orte_tag_output 0"  # there may be fewer cores than hosts
        ).split()
        # Without what a process that has initialized MPI by itself has in its environment: mpirun would take it for its own.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))}
        environment = {"OMP_NUM_THREADS": "1", **kept, CARD: "eth0", RATE: self._rate or "", "TMPDIR": str(self._folder)}
        exported = [part for name in ("OMP_NUM_THREADS", CARD, RATE) for part in ("-x", name)]
        whole = [*mpirun, "--mca", "plm_rsh_agent", str(self._agent), *exported, *command]
        first = [str(self._agent), "10.77.0.1", shlex.join(whole)]
        return subprocess.run(first, env=environment, stdin=subprocess.DEVNULL, check=False).returncode


def _burst(rate: str) -> int:
    """Bytes that a card may send at once, above its rate: those of 2 ms; at least half of what Linux hands it as one."""
    prefix = {"k": 1e3, "m": 1e6, "g": 1e9}.get(rate[-4], 1)
    return max(32768, int(float(rate.rstrip("kmgbit")) * prefix / 8 * 2e-3))


def _ip(arguments: str) -> None:
    _call(["ip", *arguments.split()])


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"cluster: {shlex.join(command)} failed: {done.stderr.strip()}")
