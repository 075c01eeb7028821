"""Network namespaces as groups of machines: one veth a group, token buckets on the veth and on loopback; needs root.

Ranks of one group share a namespace, so what they send one another passes its ``lo`` and what leaves the group passes
its veth: the two are shaped apart, and either is shared by all ranks of the group, as one network card would be. The
veths meet on a bridge in a namespace of its own: the host's own interfaces, routes and firewall are not touched, and
deleting the namespaces deletes everything. Names carry the process id of their maker, so the next run finds and
removes what a killed one left: ``python -m benchmarks.network.namespaces --clean``.

Without root there is the throttle inside the rings, for our own arms only: ``make_mesh(wires=Wires(rate={...}))``, or
``--links throttled`` of ``benchmarks.network.sweep``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

PREFIX = "sparing-net"
DEVICE = "uplink"
"""Name of the interface that leaves a group, the same in every namespace."""

MTU = 1500
"""Of loopback too: its own 65536 is larger than a small token bucket."""


def ip(*words: str) -> str:
    """Run ``ip``; what it prints."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def inside(namespace: str, *words: str) -> None:
    """Run a program inside a namespace."""
    ip("netns", "exec", namespace, *words)


def burst(rate: float) -> int:
    """Bytes of a token bucket: a millisecond of the rate.

    The kernel hands over up to 64 KiB at a time and a smaller bucket makes it cut them into packets, which at high
    rates costs the processor so much that the rate is not reached; at low ones a large bucket would be a gift.
    """
    return int(max(32_768 if rate < 200e6 else 131_072, rate / 8 * 0.001))


def shape(namespace: str, device: str, rate: float | None) -> None:
    """Hold what leaves one device to ``rate`` bits per second; None lifts the limit."""
    if rate is None:
        with contextlib.suppress(RuntimeError):  # nothing to lift
            ip("netns", "exec", namespace, "tc", "qdisc", "del", "dev", device, "root")
        return
    words = f"qdisc replace dev {device} root tbf rate {rate:.0f}bit burst {burst(rate)} latency 300ms"
    inside(namespace, "tc", *words.split())


@dataclass(kw_only=True)
class Network:
    """Groups on a shaped network, for as long as the ``with`` block lasts.

    Example:
        with Network(groups=2) as network:
            network.shape(inter=100e6, intra=2.5e9)
            network.command(0, ["ping", "-c1", network.address(1)])
    """

    groups: int
    """How many groups, each a namespace."""

    names: list[str] = field(default_factory=list, init=False)
    """Namespaces of the groups, in order."""

    switch: str = field(default="", init=False)
    """Namespace of the bridge."""

    def __enter__(self) -> Network:
        """Build it; what a killed run left behind goes first."""
        clean()
        base = f"{PREFIX}-{os.getpid()}"
        self.switch = f"{base}-switch"
        self.names = [f"{base}-{group}" for group in range(self.groups)]
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Delete it all, also after an interrupt."""
        self.close()

    def _build(self) -> None:
        """The bridge, then a veth and an address for every group."""
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        for group, name in enumerate(self.names):
            ip("netns", "add", name)
            port = f"port{group}"
            ip("-n", name, "link", "add", DEVICE, "type", "veth", "peer", "name", port, "netns", self.switch)
            ip("-n", self.switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"{self.address(group)}/24", "dev", DEVICE)
            ip("-n", name, "link", "set", DEVICE, "up")
            ip("-n", name, "link", "set", "lo", "mtu", str(MTU), "up")
            inside(name, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")  # bbr guesses a rate of its own

    def address(self, group: int) -> str:
        """IP address of a group."""
        return f"10.78.0.{group + 1}"

    def shape(self, *, inter: float | None, intra: float | None) -> None:
        """Set the rates, bits per second, of both directions of every veth and of every loopback."""
        for group, name in enumerate(self.names):
            shape(name, DEVICE, inter)
            shape(self.switch, f"port{group}", inter)
            shape(name, "lo", intra)

    def command(self, group: int, words: list[str]) -> list[str]:
        """The command line that runs ``words`` inside a group."""
        return ["ip", "netns", "exec", self.names[group], *words]

    def close(self) -> None:
        """End what still runs inside the namespaces and delete them."""
        for name in [*self.names, self.switch]:
            remove(name)
        self.names = []


def remove(name: str) -> None:
    """End the processes of one of our namespaces and delete it; nothing where there is none."""
    if name not in namespaces():
        return
    for pid in ip("netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    ip("netns", "del", name)


def namespaces() -> list[str]:
    """Our namespaces that exist, of any run."""
    return [line.split()[0] for line in ip("netns", "list").splitlines() if line.startswith(PREFIX)]


def clean() -> list[str]:
    """Remove the namespaces whose maker is gone; their names."""
    left = []
    for name in namespaces():
        found = re.fullmatch(rf"{PREFIX}-(\d+)-\w+", name)
        if found and not Path(f"/proc/{found[1]}").exists():
            remove(name)
            left.append(name)
    return left


def allowed() -> bool:
    """Whether namespaces can be made here at all."""
    try:
        name = f"{PREFIX}-{os.getpid()}-try"
        ip("netns", "add", name)
        ip("netns", "del", name)
    except (RuntimeError, FileNotFoundError):
        return False
    return True


def main() -> None:
    """Remove leftovers, or say what there is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clean", action="store_true", help="remove the namespaces of runs that were killed")
    options = parser.parse_args()
    for name in clean() if options.clean else namespaces():
        print(name)


if __name__ == "__main__":
    main()
