"""The life of a daemon: bind, load, ready, run, drain, stop.

Decides the order of the phases, what signals do, and the exit status; called by `prefill_node` and
`decode_node` with a node that knows the rest. The loop thread is the main thread. It must never compute, and
never exits silently: the last log entry says why. A daemon that is at fault itself leaves its last steps in a
file, see `common.story`.

For tests, `--hold-dir`: a file `step.<class of an event>` that says `repeat` has the next such event stepped
twice, as a thread that answers twice would.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Iterable
from typing import Any, Protocol

from common import limits
from common.clock import now_ms
from common.config import NodeConfig
from common.errors import ConfigError, ExitStatus, InvariantViolation
from common.hooks import HoldPoints
from common.log import NodeLog
from common.log_events import LogEvent
from common.story import Story, ending_of, reason_of
from common.version import VERSION
from transport.loop import Loop
from transport.peers import Tick
from transport.story_file import story_directory, write_story


def stall_bound_ms(asked_ms: int | None, longest_chunk_ms: int) -> int:
    """The stall bound in force. Raises `ConfigError` when it would take a long chunk for a hung engine."""
    if asked_ms is not None and asked_ms <= longest_chunk_ms:
        raise ConfigError(
            f"--stall-ms {asked_ms} is not longer than the engine's longest chunk or step"
            f" ({longest_chunk_ms} ms): raise it or leave it out"
        )
    return 2 * longest_chunk_ms if asked_ms is None else asked_ms


class Node(Protocol):
    """What a daemon runs. `leaving` is the exit status and reason once the node wants to go.

    stack: the pure object behind `step`, once loaded; nobody else steps it.
    """

    role: str
    incarnation: str
    leaving: tuple[int, str] | None
    stack: Any

    def bind(self, loop: Loop) -> str:
        """Take the endpoint, begin to load the engine; the resolved endpoint. Raises `ConfigError`."""

    def load(self) -> bool:
        """Look whether the engine is loaded, and be ready if so. Raises `ConfigError`."""

    def receive(self) -> Iterable[Any]:
        """Events of sockets and threads since the last call."""

    def step(self, event: Any, now_ms: int) -> list[Any]:
        """Let the node's stack decide; what has to be done outside."""

    def execute(self, effect: Any, now_ms: int) -> list[Any]:
        """Do it; events that follow at once."""

    def flush(self, now_ms: int) -> list[Any]:
        """Try again what sockets refused; events that follow."""

    def deadline_ms(self, now_ms: int) -> int | None:
        """When `step(Tick)` or `flush` is due at the latest."""

    def check(self) -> None:
        """Raise `InvariantViolation` when the node contradicts itself."""

    def stop_requested(self) -> Any:
        """The event that begins the drain."""

    def close(self, orderly: bool) -> None:
        """Let go of everything outside the process; join the threads when `orderly`."""


class Daemon:
    """Runs one node on the main thread."""

    def __init__(self, node: Node, log: NodeLog, config: NodeConfig) -> None:
        self._node = node
        self._log = log
        self._config = config
        self._hooks = None if config.hold_dir is None else HoldPoints(config.hold_dir, log)
        self._loop = Loop()
        self._story: Story | None = None
        self._place = "outside"
        self._steps = 0
        self._stopping = False
        self._ready = False

    def run(self) -> int:
        """All phases; the exit status."""
        self._loop.catch_signals(signal.SIGTERM, signal.SIGINT)
        try:
            status, reason = self._phases()
        except ConfigError as error:
            status, reason = ExitStatus.CONFIG, str(error)
            sys.stderr.write(f"python -m {self._node.role}_node: error: {error}\n")
        except InvariantViolation as error:
            self._log.error(LogEvent.INVARIANT_VIOLATED, detail=str(error))
            status, reason = ExitStatus.INVARIANT, str(error)
            self._tell_story(error)
        except Exception as error:
            self._log.error(LogEvent.NODE_FAILED, detail=traceback.format_exc())
            status, reason = ExitStatus.INVARIANT, repr(error)
            self._tell_story(error)
        orderly = self._ready and status == ExitStatus.OK
        self._node.close(orderly)
        self._log.info(LogEvent.NODE_STOPPED, status=int(status), reason=reason)
        self._log.close()
        if not orderly:
            sys.stderr.flush()
            # Compute may be inside native code that never returns; nothing is left to clean up.
            os._exit(status)
        self._loop.close()
        return int(status)

    def _phases(self) -> tuple[int, str]:
        started_ms = now_ms()
        endpoint = self._node.bind(self._loop)
        self._log.info(LogEvent.NODE_BOUND, endpoint=endpoint, ms=now_ms() - started_ms)
        while not self._node.load():
            if self._loop.poll(None):
                return ExitStatus.OK, "stopped while loading"
        self._story = Story(self._node.stack)
        self._ready = True
        self._log.info(LogEvent.NODE_READY, endpoint=endpoint, ms=now_ms() - started_ms)
        self._announce(endpoint)
        while self._node.leaving is None:
            self._turn()
        return self._node.leaving

    def _announce(self, endpoint: str) -> None:
        line = {
            "ready": True,
            "role": self._node.role,
            "endpoint": endpoint,
            "pid": os.getpid(),
            "incarnation": self._node.incarnation,
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    def _turn(self) -> None:
        """One turn of the loop: wait, then take everything that has happened. It is all of one moment."""
        paused_ms = self._loop.paused_ms
        self._loop.end_turn()
        signals = self._loop.poll(self._node.deadline_ms(self._loop.now_ms()))
        moment_ms = self._loop.now_ms()
        if self._loop.paused_ms > paused_ms:
            self._log.warning(LogEvent.NODE_PAUSED, ms=self._loop.paused_ms - paused_ms)
        for number in signals:
            self._on_signal(number, moment_ms)
        for event in self._node.receive():
            self._drive(event, moment_ms)
        for event in self._node.flush(moment_ms):
            self._drive(event, moment_ms)
        deadline_ms = self._node.deadline_ms(moment_ms)
        if deadline_ms is not None and deadline_ms <= moment_ms:
            self._drive(Tick(), moment_ms)

    def _on_signal(self, number: signal.Signals, moment_ms: int) -> None:
        self._log.info(LogEvent.SIGNAL_RECEIVED, signal=number.name)
        if self._stopping:
            self._node.leaving = (ExitStatus.ABORTED, f"second signal: {number.name}")
            return
        self._stopping = True
        self._log.info(LogEvent.NODE_DRAINING)
        self._drive(self._node.stop_requested(), moment_ms)

    def _drive(self, event: Any, moment_ms: int) -> None:
        """Step the node, do what it asks for, and go on with what follows from that."""
        events = [event]
        while events and self._node.leaving is None:
            event = events.pop(0)
            if self._hooks is not None and self._hooks.at(f"step.{type(event).__name__}") == "repeat":
                events.insert(0, event)
            self._story.record(event, moment_ms)
            self._place = "step"
            effects = self._node.step(event, moment_ms)
            self._place = "outside"
            for effect in effects:
                events += self._node.execute(effect, moment_ms)
            self._steps += 1
            if self._steps % limits.STEPS_PER_CHECK == 0:
                self._place = "check"
                self._node.check()
                self._place = "outside"

    def _tell_story(self, error: Exception) -> None:
        """Leave the last steps in a file. The way out goes on whatever happens here."""
        if self._story is None:
            return
        flags = {name: value for name, value in self._config.model_dump().items() if "key" not in name}
        head = {
            "version": VERSION,
            "role": self._node.role,
            "incarnation": self._node.incarnation,
            "place": self._place,
            "reason": reason_of(error),
            "flags": flags,
        }
        try:
            lines = self._story.lines(head, ending_of(self._node.stack, self._story.last_ms))
            directory = story_directory(self._config.story_dir)
            path = write_story(directory, self._node.role, self._node.incarnation, lines)
        except Exception:
            self._log.error(LogEvent.STORY_FAILED, detail=traceback.format_exc())
        else:
            self._log.error(LogEvent.STORY_WRITTEN, path=str(path))
