"""One daemon as a child process, seen from its launcher.

Decides how a daemon is started (a process group of its own, bound to the launcher's life, stdout and stderr
in files), how its ready line is read, and how its end and its log are told to a person. Used by
`transport/launch/pair.py` alone. It must never read from the daemon over a pipe: a launcher that dies must
not take the daemon's log, or its orderly end, with it.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.clock import now_ms, pause_ms
from common.errors import ExitStatus

_ROOT = Path(__file__).parents[2]
_POLL_MS = 10
_HIDDEN = ("ts", "level", "event", "node", "incarnation")
_LEVELS = ("debug", "info", "warning", "error")


class DaemonProcess:
    """`python -m PROGRAM ARGUMENTS`. The log is `PROGRAM.log` in `directory`; endpoint: None until ready.

    suffix: what tells several of one program apart.
    """

    def __init__(self, program: str, arguments: Sequence[str], directory: Path, suffix: str = "") -> None:
        self.name = f"{program.split('.')[-1].replace('_', ' ')} {suffix}".rstrip()
        self.log_path = directory / f"{program}{suffix}.log"
        self.endpoint: str | None = None
        self._complaint_head = f"python -m {program}: "
        self._output_path = directory / f"{program}{suffix}.out"
        self._shown_bytes = 0
        command = [sys.executable, "-m", program, "--log-form", "json", *arguments]
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        with self.log_path.open("wb") as log, self._output_path.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "transport.launch.bound_child", str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
                process_group=0,  # the terminal's Ctrl-C is for the launcher
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def ready(self) -> bool:
        """Whether the ready line is there; from then on `endpoint` is known."""
        if self.endpoint is None:
            line, end, _ = self._output_path.read_text(encoding="utf-8").partition("\n")
            self.endpoint = json.loads(line)["endpoint"] if end else None
        return self.endpoint is not None

    def request_stop(self) -> None:
        """Ask it to drain; a second time, to leave at once."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, with its process group, and wait for that."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:  # else its number may be another process's by now
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                self._process.send_signal(number)

    def wait(self, timeout_ms: int) -> bool:
        """Whether it has ended within the time."""
        deadline_ms = now_ms() + timeout_ms
        while self._process.poll() is None and now_ms() < deadline_ms:
            pause_ms(_POLL_MS)
        return self._process.poll() is not None

    def ending(self) -> str:
        """How it ended, in words."""
        status = self._process.poll()
        if status is None:
            return f"the {self.name} is still running"
        if status < 0:
            return f"the {self.name} was killed by {signal.Signals(-status).name}"
        meaning = ExitStatus(status).name if status in list(ExitStatus) else "unknown"
        return f"the {self.name} ended with exit status {status} ({meaning})"

    def new_lines(self, level: str) -> list[str]:
        """What it has logged at this level or above since the last call, made readable.

        Without what `complaint` tells: a daemon says it only to end.
        """
        with self.log_path.open("rb") as log:
            log.seek(self._shown_bytes)
            whole, end, _ = log.read().rpartition(b"\n")
        self._shown_bytes += len(whole) + len(end)
        lines = [_readable(line, level) for line in whole.splitlines()]
        return [line for line in lines if line and not line.startswith(self._complaint_head)]

    def complaint(self) -> str:
        """What it says against its configuration, empty if nothing."""
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        head = f"{self._complaint_head}error: "
        lines = text[text.find(head) + len(head) :].splitlines() if head in text else []
        ours = [line for line in lines if not line.startswith(("{", self._complaint_head))]
        return "\n".join(ours)

    def last_reason(self) -> str:
        """Why it ended, by the last entry of its log; empty if that does not say."""
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return _entry(lines[-1]).get("reason", "") if lines else ""

    def last_lines(self, count: int) -> list[str]:
        """The end of its log: what is no log entry, such as an error for a person, if there is any."""
        lines = self.log_path.read_bytes().splitlines()
        plain = [line for line in lines if not line.startswith(b"{")]
        return [_readable(line, "debug") for line in (plain or lines)[-count:]]


def _readable(line: bytes, level: str) -> str:
    """A line of the log for a terminal, empty below `level`; what is no entry stays as it is."""
    text = line.decode("utf-8", "replace")
    entry = _entry(text)
    if not {"level", "event", "node"} <= entry.keys():
        return text
    if _LEVELS.index(entry["level"]) < _LEVELS.index(level):
        return ""
    fields = [f"{name}={value}" for name, value in entry.items() if name not in _HIDDEN]
    return " ".join([f"{entry['node']:7} {entry['level']:7} {entry['event']}", *fields])


def _entry(line: str) -> dict[str, Any]:
    """An entry of the log, empty for a line that is none."""
    try:
        return json.loads(line) if line.startswith("{") else {}
    except ValueError:
        return {}
