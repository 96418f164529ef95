"""What the gateway remembers of its jobs, for the page that shows them.

Decides what GET /state tells: the last jobs and the running ones with their timings, and tokens per second.
Instants are milliseconds of this process's own clock, given beside its present value, so that a page can
place them. Nothing of a prompt or an answer is kept.
"""

from collections import deque
from dataclasses import asdict
from typing import Any

from common.clock import now_ms
from common.messages import Finished

FINISHED_JOBS = 300
RATE_S = 10


class JobRecord:
    """One job's place in history."""

    __slots__ = ("arrived_ms", "ended_ms", "error", "first_token_ms", "job_id", "label", "outcome", "stream")

    def __init__(self, label: str, arrived_ms: int, stream: bool) -> None:
        self.label = label
        self.stream = stream
        self.arrived_ms = arrived_ms
        self.job_id: str | None = None
        self.first_token_ms: int | None = None
        self.ended_ms: int | None = None
        self.outcome: Finished | None = None
        self.error: str | None = None

    def described(self) -> dict[str, Any]:
        """Plain values. Instants are of the gateway's clock; what is not known is None."""
        end = self.outcome
        return {
            "label": self.label,
            "job_id": self.job_id,
            "stream": self.stream,
            "arrived_ms": self.arrived_ms,
            "first_token_ms": self.first_token_ms,
            "ended_ms": self.ended_ms,
            "error": self.error,
            "path": None if end is None else end.path,
            "finish_reasons": None if end is None else list(end.reasons or (end.reason,)),
            "usage": None if end is None else asdict(end.usage),
            "timings": None if end is None else asdict(end.timings),
        }


class History:
    """The last jobs of this gateway."""

    def __init__(self) -> None:
        self.running: dict[str, JobRecord] = {}
        self._ended: deque[JobRecord] = deque(maxlen=FINISHED_JOBS)
        self._counts = [0] * (RATE_S + 1)
        self._second = 0

    def begin(self, label: str, arrived_ms: int, stream: bool) -> JobRecord:
        """A job was sent."""
        record = self.running[label] = JobRecord(label, arrived_ms, stream)
        return record

    def end(self, record: JobRecord, outcome: Finished | None, error: str | None) -> None:
        """A request has its answer, or has left."""
        if self.running.pop(record.label, None) is not None:
            record.ended_ms = now_ms()
            record.outcome, record.error = outcome, error
            self._ended.append(record)

    def count_tokens(self, count: int, moment_ms: int) -> None:
        """Tokens have arrived."""
        if moment_ms // 1_000 != self._second:
            self._turn()
        self._counts[self._second % len(self._counts)] += count

    def tokens_per_s(self) -> float:
        """Mean over the last ten whole seconds."""
        self._turn()
        current = self._counts[self._second % len(self._counts)]
        return (sum(self._counts) - current) / RATE_S

    def _turn(self) -> None:
        second = now_ms() // 1_000
        for passed in range(max(self._second + 1, second - len(self._counts) + 1), second + 1):
            self._counts[passed % len(self._counts)] = 0
        self._second = second

    def described(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "now_ms": now_ms(),
            "tokens_per_s": self.tokens_per_s(),
            "running": [record.described() for record in self.running.values()],
            "ended": [record.described() for record in self._ended],
        }
