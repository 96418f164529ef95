"""The two daemons of the run, through all their lives on one endpoint each.

Decides how a node is started, stopped, continued, killed, drained and started again, and what is remembered
of each life for the audit. Everything here is called on the main thread: the kernel ends a daemon with the
thread that started it. A disturbance is a generator that yields milliseconds to wait, so that both nodes can
be disturbed at once by one thread.
"""

import json
import os
import signal
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

from chaos_parts.schedule import NodeAct
from common.clock import now_ms
from transport.launch.daemon_process import DaemonProcess

Waits = Generator[int, None, None]
"""A piece of work in steps; what it yields is how many milliseconds to wait before the next."""

_POLL_MS = 20
_DRAIN_MARGIN_MS = 3_000


@dataclass(slots=True)
class Life:
    """One process of a node. how: `killed`, `drained`, `by itself`, or `running`.

    leaving_ms: when its end was asked for, or was seen if nobody asked. resident: (ms since it was ready,
    MiB) as sampled. identity: its incarnation, once it was ready.
    """

    node: str
    number: int
    pid: int
    log_path: Path
    identity: str = ""
    how: str = "running"
    status: int | None = None
    ready_ms: int | None = None
    leaving_ms: int | None = None
    ended_ms: int | None = None
    slabs: list[str] = field(default_factory=list)
    resident: list[tuple[int, float]] = field(default_factory=list)
    problem: str = ""


class ChaosNode:
    """One node, `decode` or `prefill`; `life` is its present life or, when it is away, its last.

    flags: the flags of its n-th life, without the endpoint.
    """

    def __init__(
        self, program: str, endpoint: str, directory: Path, flags: Callable[[int], list[str]]
    ) -> None:
        self.name = program.removesuffix("_node")
        self.endpoint = endpoint
        self.lives: list[Life] = []
        self.stopped = False
        self._program = program
        self._directory = directory
        self._flags = flags
        self._daemon: DaemonProcess | None = None

    @property
    def life(self) -> Life:
        return self.lives[-1]

    @property
    def running(self) -> bool:
        return self._daemon is not None and self._daemon.status is None

    @property
    def ready(self) -> bool:
        """Whether it runs and has bound its endpoint; the first time, that is remembered."""
        if not self.running or not self._daemon.ready():
            return False
        if self.life.ready_ms is None:
            self._remember()
        return True

    def start(self) -> None:
        """Begin the next life."""
        number = len(self.lives) + 1
        directory = self._directory / f"{self.name}-{number}"
        directory.mkdir()
        arguments = [*self._flags(number), "--bind", self.endpoint]
        self._daemon = DaemonProcess(self._program, arguments, directory)
        self.lives.append(Life(self.name, number, self._daemon.pid, self._daemon.log_path))

    def _remember(self) -> None:
        life = self.life
        line = (life.log_path.parent / f"{self._program}.out").read_text(encoding="utf-8")
        life.identity = json.loads(line)["incarnation"]
        maps = Path(f"/proc/{life.pid}/maps").read_text(encoding="utf-8").split()
        life.slabs = sorted({word for word in maps if word.startswith("/dev/shm/")})
        life.ready_ms = now_ms()

    def stop(self) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP)
        self.stopped = True

    def go_on(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)
        self.stopped = False

    def kill(self) -> None:
        """SIGKILL, and wait for it."""
        if self._daemon is not None:
            self._leaving()
            self._daemon.kill()
            self._ended("killed")
            self.stopped = False

    def _signal(self, number: signal.Signals) -> None:
        if self.running:
            os.kill(self.life.pid, number)

    def _leaving(self) -> None:
        if self.life.leaving_ms is None:
            self.life.leaving_ms = now_ms()

    def _ended(self, how: str) -> None:
        life = self.life
        self._leaving()
        if life.ended_ms is None:
            life.how, life.status, life.ended_ms = how, self._daemon.status, now_ms()

    def look(self) -> bool:
        """Whether it lives; an end that nobody asked for is remembered as such."""
        if self._daemon is not None and self._daemon.status is not None:
            self._ended("by itself")
        return self.running

    def wait_ready(self, timeout_ms: int) -> Waits:
        """Until the node is ready, or has ended by itself, or the time is over."""
        deadline_ms = now_ms() + timeout_ms
        while self.look() and not self.ready:
            if now_ms() > deadline_ms:
                self.life.problem = f"not ready within {timeout_ms} ms"
                return
            yield _POLL_MS

    def drain(self, drain_ms: int) -> Waits:
        """SIGTERM, and until it has gone; one that stays beyond its drain deadline is killed and blamed."""
        if not self.look():
            return
        self._leaving()
        self._daemon.request_stop()
        deadline_ms = now_ms() + drain_ms + _DRAIN_MARGIN_MS
        while self.running:
            if now_ms() > deadline_ms:
                self.life.problem = f"did not end within {drain_ms + _DRAIN_MARGIN_MS} ms of SIGTERM"
                self.kill()
                return
            yield _POLL_MS
        self._ended("drained")

    def disturb(self, act: NodeAct, drain_ms: int) -> Waits:
        """Carry out an act, up to where the node runs or starts again."""
        if act.kind.startswith("stop"):
            self.stop()
            yield act.hold_ms
            self.go_on()
            return
        if act.kind == "drain":
            yield from self.drain(drain_ms)
        else:
            self.kill()
        yield act.hold_ms
        self.start()
        if act.kind == "kill twice":
            yield act.hold_ms
            self.kill()
            self.start()
