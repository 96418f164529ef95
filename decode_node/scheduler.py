"""What the decode node does next: the contract of prefetch as one decision function.

Decides, for the head of the queue and for prefilled jobs, whether to import, to prefill locally, to send a
PREFILL, or to wait. Asked by the core after every event until it answers None. It must never change slots or
lanes: the core applies a decision and asks again.

With one lane and depth 1: while the lane decodes job A, the next queued job B is sent to the prefill node. At
most free lanes + depth productions are held at a time, where a lane is free until its import starts. A job
leaves the queue when it is sent, so it cannot be sent twice; a prefilled one waits here until it is imported.
"""

import heapq
from dataclasses import dataclass

from common.lifecycle import JobState
from common.prefetch_route import check_prefetch_route
from decode_node.jobs import Job
from decode_node.lanes import Lane, Lanes
from decode_node.pace import Pace
from decode_node.slots import GrantedSlot
from decode_node.workers import Workers


@dataclass(frozen=True, slots=True)
class Route:
    """How prompts may be computed; the flags of the same names say what each means.

    prefetch_auto: the depth follows the pace of the jobs, and `prefetch_depth` is the least.
    min_remote_prompt_tokens: None follows the pace, too.
    """

    prefill_workers: tuple[str, ...]
    remote_only: bool
    backend: str
    slots: int
    prefetch_depth: int = 0
    on_prefill_failure: str = "fail"
    min_remote_prompt_tokens: int | None = 0
    prefetch_auto: bool = False

    @property
    def local_allowed(self) -> bool:
        return not self.remote_only


@dataclass(frozen=True, slots=True)
class ImportInto:
    """Copy a prefilled job's KV into a free lane."""

    job: Job
    lane: Lane


@dataclass(frozen=True, slots=True)
class PrefillLocally:
    """Compute a job's prompt in a free lane."""

    job: Job
    lane: Lane


@dataclass(frozen=True, slots=True)
class SendPrefill:
    """Reserve a slot for a job and send its PREFILL; a prefetch when no lane is free for it."""

    job: Job
    slot: GrantedSlot
    prefetch: bool


Decision = ImportInto | PrefillLocally | SendPrefill
_Place = tuple[int, int, Job]
_SWEEP_PUSHES = 256


class Scheduler:
    """The queue and the prefilled jobs, both in order of arrival."""

    def __init__(self, route: Route, pace: Pace | None = None) -> None:
        """Raises ValueError for a route that cannot support the prefetch it asks for."""
        check_prefetch_route(
            prefill_workers=route.prefill_workers,
            remote_only=route.remote_only,
            backend=route.backend,
            slots=route.slots,
            prefetch_depth=route.prefetch_depth,
            on_prefill_failure=route.on_prefill_failure,
        )
        self.route = route
        self.pace = pace or Pace()
        self._queued: list[_Place] = []
        self._prefilled: list[_Place] = []
        self._pushes = 0

    def enqueue(self, job: Job) -> None:
        """A QUEUED job takes its place, the old one when it comes back."""
        self._push(self._queued, job)

    def hold(self, job: Job) -> None:
        """A PREFILLED job waits for its first token and a lane."""
        self._push(self._prefilled, job)

    def _push(self, heap: list[_Place], job: Job) -> None:
        self._pushes += 1
        heapq.heappush(heap, (job.order, self._pushes, job))
        if self._pushes % _SWEEP_PUSHES == 0:
            # A head that waits for long would keep every job that came and went behind it.
            _sweep(self._queued, JobState.QUEUED)
            _sweep(self._prefilled, JobState.PREFILLED)

    def head(self) -> Job | None:
        """The first queued job."""
        return _first(self._queued, JobState.QUEUED)

    def depth(self, granted_count: int) -> int:
        """The depth in force: what was asked for, or what the pace asks for, at most the slots there are."""
        wanted = self.route.prefetch_depth
        if self.route.prefetch_auto:
            wanted = max(wanted, self.pace.depth(self.route.slots))
        return min(wanted, granted_count)

    def min_remote_tokens(self, token_limit: int) -> int:
        """Shorter prompts are computed here, where that is allowed."""
        asked = self.route.min_remote_prompt_tokens
        return self.pace.min_remote_tokens(token_limit) if asked is None else asked

    def goes_local(self, job: Job, workers: Workers) -> bool:
        """Whether this node is to compute the job's prompt."""
        if job.force_local or (self.route.local_allowed and not workers.usable):
            return True
        if self.route.local_allowed and job.prompt_tokens < self.min_remote_tokens(workers.max_tokens):
            return True
        # Without logits the last prompt token is this node's in any case: nothing is left to send.
        return job.prompt_tokens == 1 and workers.usable and not workers.logits

    def must_wait(self, job: Job, workers: Workers) -> bool:
        """Whether nothing can be done for the job until a prefill node is usable."""
        return not workers.usable and not self.goes_local(job, workers)

    def decide(self, lanes: Lanes, workers: Workers) -> Decision | None:
        """The next thing to do, if anything can be done now."""
        lane = lanes.free()
        prefilled = _first(self._prefilled, JobState.PREFILLED)
        if lane is not None and prefilled is not None and prefilled.importable:
            return ImportInto(prefilled, lane)
        job = self.head()
        if job is None:
            return None
        held = workers.live_count
        if self.goes_local(job, workers):
            # A lane that a production was sent for is not taken from it.
            unclaimed = lane is not None and lanes.free_count > held
            return PrefillLocally(job, lane) if unclaimed else None
        if held >= lanes.free_count + self.depth(workers.granted_count):
            return None
        slot = workers.choose(job)
        if slot is None:
            return None
        return SendPrefill(job, slot, prefetch=held >= lanes.free_count)


def _first(heap: list[_Place], state: JobState) -> Job | None:
    """The first job still in `state`; those that have moved on are dropped on the way."""
    while heap and heap[0][2].state is not state:
        heapq.heappop(heap)
    return heap[0][2] if heap else None


def _sweep(heap: list[_Place], state: JobState) -> None:
    heap[:] = [place for place in heap if place[2].state is state]
    heapq.heapify(heap)
