"""Named points at which a test may hold, fail or spoil a daemon. A testing instrument, off by default.

`--hold-dir DIR` turns it on. A test writes a file `DIR/<point>` whose text says what happens when a thread
comes by:

    hold     (or an empty file) the thread logs hook.held and waits until the file is gone or says otherwise,
             then logs hook.released; a test can so stop a process between any two steps, without sleeping
    fail     `HookFailure` is raised
    other    the text goes to the caller, which knows what it means (`corrupt` flips a byte)
    ... once the file is removed first, so that one arrival alone is affected

Called by compute and text threads and by the wiring of the nodes; never by a core, and a `hold` never on a
thread that owns sockets unless the test is about a silent node.
"""

from pathlib import Path

from common.clock import pause_ms
from common.log import NodeLog
from common.log_events import LogEvent

HOLD_POLL_MS = 1


class HookFailure(Exception):
    """What a point raises when its file says `fail`."""


class HoldPoints:
    """The points of one process. `directory` None: every point returns None at once."""

    def __init__(self, directory: str | None, log: NodeLog) -> None:
        self._directory = None if directory is None else Path(directory)
        self._log = log

    def at(self, point: str) -> str | None:
        """Pass the point. Returns the action's text if it is for the caller. Raises `HookFailure`."""
        if self._directory is None:
            return None
        action = self._taken(self._directory / point)
        if action == "hold":
            self._log.info(LogEvent.HOOK_HELD, point=point)
            while action == "hold":
                pause_ms(HOLD_POLL_MS)
                action = self._taken(self._directory / point)
            self._log.info(LogEvent.HOOK_RELEASED, point=point)
        if action == "fail":
            raise HookFailure(f"the test hook {point} says fail")
        return action

    def _taken(self, path: Path) -> str | None:
        """The action in force, its file removed if it ends in ` once`; of two threads one gets it."""
        try:
            # A file just created is empty until its text is there.
            action = path.read_text().strip() or "hold"
            if action.endswith(" once"):
                path.unlink()
        except FileNotFoundError:
            return None
        return action.removesuffix(" once")
