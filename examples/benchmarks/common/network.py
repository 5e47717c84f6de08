"""An emulated network: hosts on one machine, joined by links of a given bandwidth.

Every host is a network namespace with one interface, wired to a bridge in a namespace
of its own; token buckets at both ends of each wire give it its bandwidth. No namespace
has a name: a keeper process holds each open and ends with this process, however that
ends, and the kernel then removes links, bridge and mounts. Needs root.

    with Network(hosts=4, bandwidth_mbit=100) as net:
        job = net.launch(["train.py", "--steps", "5"])
        net.links.set_bandwidth(20)
        job.wait(timeout_seconds=600)
        print(net.links.sent_bytes())
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from gravac_jax.launch import Job, ProcessDiedError, local_environment

TOOLS = ("unshare", "nsenter", "mount", "ip", "tc")
HANDLE = "EMULATED_NETWORK"
MAX_HOSTS = 200  # in one /24

# Otherwise Linux clears the temporaries of every step in small pages, which takes as
# long as an update of 10 million entries in one bit.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

# What may leave at once after a pause: a payload that is smaller does not meet the
# bandwidth at all. With half a millisecond's worth, two busy cores fill the bucket too
# late: four hosts take 1.3 to 5 times what the bytes take at 300 and 1000 Mbit/s, with
# two milliseconds' 1.05.
MIN_BURST_BYTES = 3200  # two frames
BURST_SECONDS = 0.002

# The last command ends when its input does: with the process that made the network.
KEEPER = 'mount --bind "$1" /etc/hosts && ip link set lo up && echo up && exec cat'


class NetworkError(RuntimeError):
    """An emulated network that cannot be made or changed."""


@dataclasses.dataclass(frozen=True)
class Links:
    """The links of a network, as every process of the machine may use them.

    Attributes:
      label: The kind of network, to be written beside all figures.
      hosts: The process that keeps each host's namespace.
      switch: The process that keeps the bridge's namespace.
    """

    label: str
    hosts: tuple[int, ...]
    switch: int

    def set_bandwidth(self, bandwidth_mbit: float | None) -> None:
        """Give every link this bandwidth from now on, in each direction.

        Args:
          bandwidth_mbit: The bandwidth in Mbit/s; None for no limit.

        Raises:
          ValueError: If it is not positive.
          NetworkError: If the kernel refuses.
        """
        if bandwidth_mbit is not None and not bandwidth_mbit > 0:
            raise ValueError(
                f"bandwidth_mbit must be positive, got {bandwidth_mbit};"
                " None is no limit"
            )
        for i, host in enumerate(self.hosts):
            _shape(host, "eth0", bandwidth_mbit)
            _shape(self.switch, f"port{i}", bandwidth_mbit)

    def sent_bytes(self) -> tuple[int, ...]:
        """Return what each host's interface has sent so far, headers included."""
        return tuple(map(_sent_bytes, self.hosts))


def attach() -> Links:
    """Return the links of the network that this process was launched on.

    Raises:
      NetworkError: If it was launched on none.
    """
    if HANDLE not in os.environ:
        raise NetworkError("this process was not launched by a Network")
    handle = json.loads(os.environ[HANDLE])
    return Links(handle["label"], tuple(handle["hosts"]), handle["switch"])


class Network:
    """Hosts with an address, and a link to a switch, of their own.

    Args:
      hosts: N, the number of hosts.
      bandwidth_mbit: The bandwidth of each link in each direction, in Mbit/s; None for
        no limit.

    Raises:
      ValueError: If there are no addresses for so many hosts.
      NetworkError: When entered, if this machine or user cannot have a network.

    Attributes:
      links: The links, once the network is entered.
    """

    links: Links

    def __init__(self, hosts: int, bandwidth_mbit: float | None = None) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"hosts must be between 1 and {MAX_HOSTS}, got {hosts}")
        self.hosts = hosts
        self._bandwidth_mbit = bandwidth_mbit
        self._stack = contextlib.ExitStack()
        self._ports = itertools.count(7777)

    @staticmethod
    @functools.cache
    def unavailable() -> str | None:
        """Return in one line why there can be no network here; None if there can."""
        try:
            with Network(hosts=1, bandwidth_mbit=1) as net:
                net.run([["true"]]).wait()
                return None
        except (NetworkError, ProcessDiedError) as error:
            return str(error)

    def __enter__(self) -> Self:
        with self._stack:
            self.links = self._connect()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def launch(self, script: Sequence[str]) -> Job:
        """Start one `jax.distributed` job with a process in each host.

        Args:
          script: A Python file and its arguments; it may call `attach`.

        Returns:
          The job; leaving the network ends it.
        """
        coordinator = self.coordinator()
        job = [sys.executable, "-m", "gravac_jax.launch", "--detect", "deactivate"]
        job += ["--coordinator", coordinator, "--processes", str(self.hosts)]
        return self.run(
            ([*job, "--process", str(i), *script] for i in range(self.hosts)),
            # Hosts share the machine's accelerators, if it has any.
            {**HUGE_PAGES, **local_environment(coordinator), "JAX_PLATFORMS": "cpu"},
        )

    def run(
        self,
        commands: Iterable[Sequence[str]],
        env: Mapping[str, str] = os.environ,
    ) -> Job:
        """Start one command in each host, all of them in this directory."""
        env = {**env, HANDLE: json.dumps(dataclasses.asdict(self.links))}
        enter = ["-n", "-m", f"--wdns={Path.cwd()}", "--"]
        inside = [
            ["nsenter", "-t", str(keeper), *enter, *command]
            for keeper, command in zip(self.links.hosts, commands, strict=False)
        ]
        return self._stack.enter_context(Job(inside, env=env))

    def coordinator(self) -> str:
        """Return a free address in the first host, where a job's processes may meet."""
        return f"{_address(0)}:{next(self._ports)}"

    def _connect(self) -> Links:
        _check_machine()
        keep = lambda address: self._stack.enter_context(_keeper(address)).pid
        hosts = tuple(keep(_address(i)) for i in range(self.hosts))
        switch = keep("127.0.0.1")
        _inside(switch, "ip link add bridge type bridge")
        _inside(switch, "ip link set bridge up")
        for i, host in enumerate(hosts):
            _wire(host, switch, i)
        links = Links(f"{self.hosts} network namespaces on a bridge", hosts, switch)
        links.set_bandwidth(self._bandwidth_mbit)
        return links


def _check_machine() -> None:
    if os.geteuid() != 0:
        raise NetworkError("an emulated network needs root")
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        raise NetworkError(f"an emulated network needs {' and '.join(missing)}")


def _address(i: int) -> str:
    return f"10.77.0.{i + 1}"


def _keeper(address: str) -> subprocess.Popen[str]:
    """Start a namespace in which this machine's name stands for `address`."""
    with tempfile.NamedTemporaryFile("w", prefix="hosts") as hosts:
        # gloo listens on the address that the machine's own name has.
        hosts.write(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        hosts.flush()
        keeper = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", KEEPER, "keeper", hosts.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # out of reach of Ctrl-C, which others still handle
        )
        assert keeper.stdout is not None
        answer = keeper.stdout.readline().strip()
    if answer != "up":
        with keeper:
            raise NetworkError(f"no namespace can be made: {answer}")
    return keeper


def _wire(host: int, switch: int, i: int) -> None:
    """Join a host to the bridge by a pair of virtual interfaces."""
    _inside(switch, f"ip link add port{i} type veth peer name eth0 netns {host}")
    _inside(switch, f"ip link set port{i} master bridge up")
    _inside(host, f"ip addr add {_address(i)}/24 dev eth0")
    _inside(host, "ip link set eth0 up")
    # Linux's own congestion control, whatever this machine prefers: under BBR these
    # queues halve what travels in both directions at once.
    _inside(host, "ip route change 10.77.0.0/24 dev eth0 congctl cubic")


def _shape(keeper: int, interface: str, bandwidth_mbit: float | None) -> None:
    queue = "noqueue"
    if bandwidth_mbit:
        burst_bytes = round(BURST_SECONDS * bandwidth_mbit * 1e6 / 8)
        burst_bytes = max(MIN_BURST_BYTES, burst_bytes)
        queue = f"tbf rate {bandwidth_mbit}mbit burst {burst_bytes} latency 100ms"
    _inside(keeper, f"tc qdisc replace dev {interface} root {queue}")


def _sent_bytes(keeper: int) -> int:
    lines = Path(f"/proc/{keeper}/net/dev").read_text().splitlines()
    (line,) = (x for x in lines if x.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


def _inside(keeper: int, command: str) -> None:
    """Run a command in the network, not the mounts, of a namespace."""
    nsenter = ["nsenter", "-t", str(keeper), "-n", "--", *command.split()]
    done = subprocess.run(nsenter, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NetworkError(f"`{command}` failed: {done.stderr.strip()}")
