"""Deadlines of jobs, kept so that setting, cancelling and finding the next one stay cheap.

Decides which deadlines have passed; used by the job desk alone. A deadline is named by its job and a kind;
setting it again replaces it. It must never outlive its job.
"""

import heapq

_STALE_MAX = 256


class Timers:
    """Deadlines by (job id, kind)."""

    def __init__(self) -> None:
        self._deadlines: dict[tuple[str, str], int] = {}
        self._heap: list[tuple[int, str, str]] = []

    def set(self, deadline_ms: int, job_id: str, kind: str) -> None:
        """Set or replace a deadline."""
        self._deadlines[job_id, kind] = deadline_ms
        heapq.heappush(self._heap, (deadline_ms, job_id, kind))
        if len(self._heap) > 2 * len(self._deadlines) + _STALE_MAX:
            # Cancelled deadlines far ahead would pile up behind a near one.
            self._heap = [(due_ms, *name) for name, due_ms in self._deadlines.items()]
            heapq.heapify(self._heap)

    def cancel(self, job_id: str, kind: str) -> None:
        """Forget a deadline, if it is set."""
        self._deadlines.pop((job_id, kind), None)

    def deadline_ms(self) -> int | None:
        """The next deadline."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_ms: int) -> list[tuple[str, str]]:
        """The (job id, kind) of every deadline that has passed; they are forgotten."""
        due = []
        while (deadline_ms := self.deadline_ms()) is not None and deadline_ms <= now_ms:
            _, job_id, kind = heapq.heappop(self._heap)
            del self._deadlines[job_id, kind]
            due.append((job_id, kind))
        return due

    def _drop_stale(self) -> None:
        while self._heap and self._deadlines.get(self._heap[0][1:]) != self._heap[0][0]:
            heapq.heappop(self._heap)
