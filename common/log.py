"""The log of a daemon: one entry per event, on stderr.

Decides the form of an entry (a JSON line, or a readable one on a terminal) and how often a warning repeats.
Called from every thread of both daemons. Events are members of `LogEvent` and the rest are fields, so that a
program can follow a job by its id; stdout stays free. It must never be called from a signal handler, and its
wall-clock time must never decide anything.
"""

import json
import logging
import re
import sys
import threading
from datetime import UTC, datetime
from typing import Any, TextIO

from common.clock import now_ms
from common.log_events import LogEvent

WARNINGS_PER_WINDOW = 5
WINDOW_MS = 10_000
WARNING_KEYS_MAX = 1_024

_PLAIN = re.compile(r"[\w.:/+\-]+", re.ASCII)


class NodeLog:
    """Writes the entries of one process. Thread safe.

    level: `debug`, `info`, `warning` or `error`. form: `json`, `text` or `auto` (text on a terminal). Of the
    warnings with one event and one `peer` field, `WARNINGS_PER_WINDOW` are written per `WINDOW_MS`; the rest
    are counted, and the counts are written once the window is over or the log is closed.
    """

    def __init__(
        self,
        *,
        node: str,
        incarnation: str,
        level: str = "info",
        form: str = "auto",
        stream: TextIO | None = None,
    ) -> None:
        stream = sys.stderr if stream is None else stream
        text = stream.isatty() if form == "auto" else form == "text"
        self._handler = logging.StreamHandler(stream)
        self._handler.setFormatter(_TextFormatter() if text else _JsonFormatter())
        self._logger = logging.Logger(f"tandem.{node}", level.upper())
        self._logger.addHandler(self._handler)
        self._process = {"node": node, "incarnation": incarnation}
        self._lock = threading.Lock()
        self._window_start_ms = now_ms()
        self._warning_counts: dict[tuple[str, str | None], int] = {}

    def debug(self, event: LogEvent, **fields: Any) -> None:
        """Each step, for whoever hunts a fault."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: LogEvent, **fields: Any) -> None:
        """Life cycle, and one entry per job."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: LogEvent, **fields: Any) -> None:
        """A mistake of a peer or the operator, or a retry; repeated ones are counted instead of written."""
        if self._may_warn(event, fields.get("peer")):
            self._write(logging.WARNING, event, fields)

    def error(self, event: LogEvent, **fields: Any) -> None:
        """Something a human should look at."""
        self._write(logging.ERROR, event, fields)

    def close(self) -> None:
        """Write the counts that are still owed. The log stays usable."""
        with self._lock:
            counts, self._warning_counts = self._warning_counts, {}
        self._write_suppressed(counts)

    def _may_warn(self, event: LogEvent, peer: Any) -> bool:
        now, over = now_ms(), {}
        with self._lock:
            if now - self._window_start_ms >= WINDOW_MS:
                over, self._warning_counts = self._warning_counts, {}
                self._window_start_ms = now
            key = (str(event), None if peer is None else str(peer))
            if key not in self._warning_counts and len(self._warning_counts) >= WARNING_KEYS_MAX:
                key = (str(event), "others")
            count = self._warning_counts[key] = self._warning_counts.get(key, 0) + 1
        self._write_suppressed(over)
        return count <= WARNINGS_PER_WINDOW

    def _write_suppressed(self, counts: dict[tuple[str, str | None], int]) -> None:
        for (event, peer), count in counts.items():
            if count > WARNINGS_PER_WINDOW:
                fields = {"warning": event, "peer": peer, "suppressed": count - WARNINGS_PER_WINDOW}
                self._write(logging.WARNING, LogEvent.WARNINGS_SUPPRESSED, fields)

    def _write(self, level: int, event: LogEvent, fields: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            # Here and in the formatter, the log's own names win over a field of the same name.
            self._logger.log(level, event, extra={"entry": {**self._process, **fields, **self._process}})


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        head = {"ts": moment, "level": record.levelname.lower(), "event": record.msg}
        return json.dumps({**head, **record.entry, **head}, separators=(",", ":"), default=str)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        shown = {name: value for name, value in record.entry.items() if name != "incarnation"}
        words = [moment, f"{record.levelname:7}", shown.pop("node"), str(record.msg)]
        return " ".join(words + [f"{name}={_shown(value)}" for name, value in shown.items()])


def _shown(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(value, default=str)
