"""Daemons as real processes, and the one way to wait for them.

Decides how a test starts, watches, stops and spoils a daemon. Used by `tests/process/world.py` and the tests
beside it. A test never sleeps: it waits for a log entry or a state, with a deadline, and a wait that fails
shows the logs of every process. Daemons live in a private directory; nothing of them may survive the test.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from common.clock import now_ms, pause_ms
from tests.process.nursery import Nursery, Nursling

ROOT = Path(__file__).parents[2]
DEADLINE_MS = 15_000
# A real model is loaded, perhaps while other tests run.
START_MS = 60_000
POLL_MS = 4
LOG_TAIL = 12
# Small, so that a test of a lost peer is short; large enough for two busy cores.
DEAD_AFTER_MS = 600
LEASE_MS = 1_200
# The emulated engines declare 1,000 ms and some for a chunk or step; a test that holds one needs more.
STALL_MS = 20_000
TIMES = ("--ping-ms", "50", "--suspect-ms", "200", "--dead-after-ms", str(DEAD_AFTER_MS))
LEASE = ("--lease-ms", str(LEASE_MS))

Found = TypeVar("Found")


class Daemon:
    """One process of `python -m <program>`, with what it wrote so far.

    entries: its log, one dict per line of stderr that is JSON. complaints: the other lines of stderr.
    wrapper: module, with its arguments, that runs the program in its stead.
    """

    def __init__(
        self, program: str, name: str, directory: Path, flags: tuple[str, ...], wrapper: tuple[str, ...] = ()
    ) -> None:
        self.name = name
        self.role = program.removesuffix("_node")
        self.hold_directory = directory / f"{name}-hold"
        self.hold_directory.mkdir(exist_ok=True)
        self.entries: list[dict[str, Any]] = []
        self.complaints: list[str] = []
        self.output: list[str] = []
        self.endpoint = ""
        self.slabs: list[Path] = []
        hold = ("--hold-dir", str(self.hold_directory))
        self.process = start(*wrapper, program, *flags, *hold)
        self._threads = [
            threading.Thread(target=self._read_output, daemon=True),
            threading.Thread(target=self._read_log, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read_output(self) -> None:
        for line in self.process.stdout:
            self.output.append(line)

    def _read_log(self) -> None:
        for line in self.process.stderr:
            if line.startswith("{"):
                self.entries.append(json.loads(line))
            else:
                self.complaints.append(line.rstrip())

    def ready(self) -> bool:
        """Whether the ready line is there; from then on `endpoint` is known."""
        if not self.output:
            return False
        line = json.loads(self.output[0])
        assert line["ready"] is True
        assert line["pid"] == self.process.pid
        self.endpoint = line["endpoint"]
        self.slabs = slabs_of(self.process.pid) if self.role == "prefill" else []
        return True

    def logged(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        """Log entries of this event whose fields have these values."""
        wanted = {"event": event, **fields}.items()
        return [entry for entry in list(self.entries) if wanted <= _hashable(entry).items()]

    def hold(self, point: str) -> None:
        """Have the next thread that comes by this point wait there."""
        self._command(point, "hold")

    def spoil(self, point: str, action: str) -> None:
        """Have the next thread that comes by, or waits there, do this once; later ones pass."""
        self._command(point, f"{action} once")

    def release(self, point: str) -> None:
        """Let everybody pass the point."""
        (self.hold_directory / point).unlink(missing_ok=True)

    def _command(self, point: str, text: str) -> None:
        draft = self.hold_directory / "draft"
        draft.write_text(text)
        draft.rename(self.hold_directory / point)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    @property
    def status(self) -> int | None:
        """Exit status, None while it runs."""
        return self.process.poll()

    def gone(self) -> bool:
        """Whether it has ended and all it wrote was read."""
        if self.process.poll() is None:
            return False
        for thread in self._threads:
            thread.join()
        self.process.stdout.close()
        self.process.stderr.close()
        return True

    def files_left(self) -> list[str]:
        """What a process that has ended should have removed."""
        candidates = list(self.slabs)
        if self.endpoint.startswith("ipc://"):
            path = self.endpoint.removeprefix("ipc://")
            candidates += [Path(path), Path(f"{path}.lock")]
        return [str(candidate) for candidate in candidates if candidate.exists()]

    def tail(self) -> str:
        """The end of its log, for a wait that failed."""
        lines = [json.dumps(entry) for entry in list(self.entries)[-LOG_TAIL:]]
        head = f"--- {self.name} (pid {self.process.pid}, exit status {self.status})"
        return "\n".join([head, *lines, *self.complaints[-LOG_TAIL:]])


def _hashable(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not isinstance(value, dict | list)}


@cache
def nursery() -> Nursery:
    """Where this test process has its emulated daemons forked."""
    made = Nursery()
    atexit.register(made.close)
    return made


def start(program: str, *flags: str, **environment: str) -> subprocess.Popen | Nursling:
    """A daemon with pipes; nothing is read or awaited."""
    if "emulated" in flags:
        return nursery().start(program, flags, {**os.environ, **environment})
    return start_afresh(program, *flags, **environment)


def start_afresh(program: str, *flags: str, **environment: str) -> subprocess.Popen:
    """The same in an interpreter of its own, as an operator starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", program, *flags],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def slabs_of(pid: int) -> list[Path]:
    """Shared memory objects that a process holds open."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return [Path(link) for link in links if link.startswith("/dev/shm/tandem-")]


def resident_bytes(daemon: Daemon) -> int:
    """Memory that the process has in use."""
    pages = int(Path(f"/proc/{daemon.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def wait_until(
    probe: Callable[[], Found],
    what: str,
    daemons: list[Daemon],
    *,
    between: Callable[[], None] = lambda: pause_ms(POLL_MS),
    deadline_ms: int = DEADLINE_MS,
) -> Found:
    """The first true value of `probe`. Fails, with the logs, when it does not come in time."""
    last_ms = now_ms() + deadline_ms
    while not (found := probe()):
        if now_ms() > last_ms:
            tails = "\n".join(daemon.tail() for daemon in daemons)
            raise AssertionError(f"{what}: not within {deadline_ms} ms\n{tails}")
        between()
    return found
