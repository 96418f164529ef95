"""What the compute thread owes an answer for, and whether it still gets on.

Decides when compute counts as hung; kept by the core, which tells it of every command and answer. A decoding
lane owes its next token, so work that is going on always owes something. It must never be asked about a
thread: it knows lanes and job ids alone.
"""

from decode_node.lanes import Lanes


class ComputeWatch:
    """Progress of one compute thread. `progress` counts its answers since start."""

    def __init__(self, stall_ms: int, lanes: Lanes) -> None:
        self._stall_ms = stall_ms
        self._lanes = lanes
        self._sampling: set[str] = set()
        self._moved_ms = 0
        self.progress = 0

    @property
    def owes(self) -> bool:
        """Whether an answer is outstanding."""
        return bool(self._sampling) or self._lanes.free_count < self._lanes.count

    def asked_to_sample(self, job_id: str) -> None:
        """A first token is owed."""
        self._sampling.add(job_id)

    def answered(self, now_ms: int, sampled_job_id: str | None = None) -> None:
        """Compute has said something; `sampled_job_id` when it was about a first token."""
        if sampled_job_id is not None:
            self._sampling.discard(sampled_job_id)
        self.progress += 1
        self._moved_ms = now_ms

    def began(self, now_ms: int) -> None:
        """Compute had nothing to do and has now."""
        self._moved_ms = now_ms

    def deadline_ms(self) -> int | None:
        """When compute counts as hung unless it answers."""
        return self._moved_ms + self._stall_ms if self.owes else None

    def slow(self, now_ms: int) -> bool:
        """Whether half the time has passed after which it counts as hung."""
        return self.owes and now_ms - self._moved_ms >= self._stall_ms // 2

    def age_ms(self, now_ms: int) -> int | None:
        """How long an answer has been owed; None when none is."""
        return now_ms - self._moved_ms if self.owes else None

    def hung(self, now_ms: int) -> bool:
        """Whether it has owed an answer for too long."""
        deadline_ms = self.deadline_ms()
        return deadline_ms is not None and now_ms >= deadline_ms
