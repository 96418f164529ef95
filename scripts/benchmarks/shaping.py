"""A link of a chosen rate between two test hosts.

Decides how the link is made: two network namespaces with a pair of virtual interfaces that `tc` slows down,
where the system lets us; else a relay process on this host that forwards TCP with rate and delay. Each says
in `note` what it is and what it cannot do. Used by `hosts.py`. It must never leave a namespace behind, and
never touch an interface that it did not make.
"""

import os
import select
import shutil
import socket
import subprocess
from collections import deque
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Self

from common.clock import now_us
from common.errors import ConfigError, TandemError

RELAY_BYTES = 65_536
# What a queue of the link may hold before its sender has to wait.
QUEUE_MS = 4


class Namespaces:
    """Two hosts, `prefill` and `decode`, joined by one link; leaving the context removes both."""

    def __init__(self, mbit_per_s: int, delay_us: int) -> None:
        name = f"tandem{os.getpid()}"
        self.hosts = {"prefill_node": f"{name}p", "decode_node": f"{name}d"}
        self.prefill_host = "10.99.99.1"
        self.worker_host = self.prefill_host
        self.note = f"network namespaces, {mbit_per_s} Mbit/s by tc"
        self._mbit_per_s, self._delay_us = mbit_per_s, delay_us

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """The interfaces go with their namespaces."""
        for host in self.hosts.values():
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)

    def _make(self) -> None:
        prefill, decode = self.hosts.values()
        for host in self.hosts.values():
            _tool("ip", "netns", "add", host)
        _tool(
            "ip", "link", "add", "veth0", "netns", prefill, "type", "veth", "peer", "veth0", "netns", decode
        )
        for number, host in enumerate(self.hosts.values(), 1):
            _tool("ip", "-n", host, "addr", "add", f"10.99.99.{number}/30", "dev", "veth0")
            for interface in ("lo", "veth0"):
                _tool("ip", "-n", host, "link", "set", interface, "up")
        delayed = [self._shape(host) for host in self.hosts.values()]
        if all(delayed):
            self.note += f", {self._delay_us} us each way"
        else:
            self.note += "; this kernel has no netem, so the link adds no delay (--link relay does)"

    def _shape(self, host: str) -> bool:
        """Slow the host's interface down; whether it delays as well."""
        rate = f"{self._mbit_per_s}mbit"
        device = ("tc", "-n", host, "qdisc", "add", "dev", "veth0")
        # A bucket of 4 ms: the kernel fills it at its clock's ticks.
        burst_bytes = max(RELAY_BYTES * 2, self._mbit_per_s * 125 * QUEUE_MS)
        if _can(*device, "root", "handle", "1:", "netem", "delay", f"{self._delay_us}us", "rate", rate):
            return True
        _tool(*device, "root", "tbf", "rate", rate, "burst", str(burst_bytes), "latency", "50ms")
        return False


class Relay:
    """A process that forwards ports of one loopback address to the same ports of another, as a link would."""

    def __init__(self, mbit_per_s: int, delay_us: int, ports: tuple[int, ...]) -> None:
        self.hosts: dict[str, str] = {}
        self.prefill_host, self.worker_host = "127.0.0.1", "127.0.0.2"
        self.note = (
            f"a relay process on this host, {mbit_per_s} Mbit/s and {delay_us} us each way; it shares the"
            " CPUs with the nodes"
        )
        forwarder = Forwarder(self.worker_host, self.prefill_host, ports, mbit_per_s, delay_us)
        self._process = get_context("spawn").Process(target=forwarder.run, daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


Link = Namespaces | Relay


def make_link(kind: str, mbit_per_s: int, delay_us: int, ports: tuple[int, ...]) -> Link:
    """The link of that kind; auto takes namespaces if this process may make them. Raises ConfigError."""
    possible = namespaces_possible()
    if kind == "namespaces" and not possible:
        raise ConfigError("network namespaces need root and the programs ip and tc: use --link relay")
    if kind == "relay" or not possible:
        return Relay(mbit_per_s, delay_us, ports)
    return Namespaces(mbit_per_s, delay_us)


def namespaces_possible() -> bool:
    """Whether a namespace can be made here: tried, because a container may forbid it."""
    if not (shutil.which("ip") and shutil.which("tc")):
        return False
    probe = f"tandem{os.getpid()}x"
    made = _can("ip", "netns", "add", probe)
    return _can("ip", "netns", "del", probe) and made


def _can(*command: str) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _tool(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise TandemError(f"{' '.join(command)}: {done.stderr.strip()}")


@dataclass(eq=False, slots=True)
class _Way:
    """One direction of a connection: what is on the wire, and when each part of it arrives."""

    source: socket.socket
    target: socket.socket
    moving: deque[tuple[int, memoryview]] = field(default_factory=deque)
    moving_bytes: int = 0
    ended: bool = False


class Forwarder:
    """The relay's work. All connections of one direction share the link's rate, as on a wire."""

    def __init__(self, near: str, far: str, ports: tuple[int, ...], mbit_per_s: int, delay_us: int) -> None:
        self._near, self._far, self._ports = near, far, ports
        self._bytes_per_us = mbit_per_s / 8
        self._delay_us = delay_us
        self._queue_bytes = max(4 * RELAY_BYTES, int(self._bytes_per_us * 1_000 * QUEUE_MS))
        self._free_us = {True: 0, False: 0}
        self._ways: dict[socket.socket, _Way] = {}
        self._near_ends: set[socket.socket] = set()

    def run(self) -> None:
        """Forward until the process is killed."""
        self._listeners = {socket.create_server((self._near, port)): port for port in self._ports}
        while True:
            self.turn()

    def turn(self) -> None:
        """Wait for what comes next, and move what is due."""
        readable = [*self._listeners]
        readable += [way.source for way in self._ways.values() if not way.ended and self._has_room(way)]
        due_us = [way.moving[0][0] for way in self._ways.values() if way.moving]
        # Never 0: what is due and not taken is tried again without spinning.
        wait_us = 50_000 if not due_us else max(50, min(due_us) - now_us())
        ready, _, _ = select.select(readable, [], [], wait_us / 1e6)
        for end in ready:
            if end in self._listeners:
                self._accept(end)
            elif end in self._ways:
                self._read(self._ways[end])
        for way in list(self._ways.values()):
            self._deliver(way)

    def _has_room(self, way: _Way) -> bool:
        return way.moving_bytes < self._queue_bytes

    def _accept(self, listener: socket.socket) -> None:
        near, _ = listener.accept()
        try:
            far = socket.create_connection((self._far, self._listeners[listener]))
        except OSError:
            near.close()
            return
        for source, target in ((near, far), (far, near)):
            source.setblocking(False)
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ways[source] = _Way(source, target)
        self._near_ends.add(near)

    def _read(self, way: _Way) -> None:
        try:
            data = way.source.recv(RELAY_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        direction = way.source in self._near_ends
        free_us = max(self._free_us[direction], now_us()) + int(len(data) / self._bytes_per_us)
        self._free_us[direction] = free_us
        way.moving.append((free_us + self._delay_us, memoryview(data)))
        way.moving_bytes += len(data)
        way.ended = not data

    def _deliver(self, way: _Way) -> None:
        moment_us = now_us()
        while way.moving and way.moving[0][0] <= moment_us:
            due_us, data = way.moving[0]
            if not data:
                self._close(way)
                return
            try:
                sent = way.target.send(data)
            except BlockingIOError:
                return
            except OSError:
                self._close(way)
                return
            way.moving_bytes -= sent
            if sent < len(data):
                way.moving[0] = (due_us, data[sent:])
                return
            way.moving.popleft()

    def _close(self, way: _Way) -> None:
        for end in (way.source, way.target):
            if self._ways.pop(end, None) is not None:
                self._near_ends.discard(end)
                end.close()
