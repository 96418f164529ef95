"""A job from admission to its one terminal answer.

Decides nothing: the record that the core keeps and changes, and where its time went. It must never hold KV,
text or sampler state; those live with the threads that use them, under the job's id.
"""

from dataclasses import dataclass, field

from common.lifecycle import JOB_TRANSITIONS, JobEvent, JobState, advance
from common.messages import PrefillDone, Timings, Usage
from common.sampling import SamplingParams
from decode_node.slots import Reservation


@dataclass(slots=True)
class Job:
    """One accepted or arriving job.

    order: its place in the queue, kept when it comes back. text_pending: tokens pushed to the text thread
    that it has not accounted for yet. text_moved_ms: when the first of them came, or the text thread last
    answered. keep_token: its first token was emitted, a later prefill must not
    sample another.
    """

    job_id: str
    client: str
    label: str
    order: int
    arrival_ms: int
    since_ms: int
    state: JobState = JobState.TOKENIZING
    prompt: bytes = b""
    prompt_digest: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    reservation: Reservation | None = None
    record: PrefillDone | None = None
    lane: int | None = None
    first_token: int | None = None
    force_local: bool = False
    retries: int = 0
    path: str = "remote"
    finish_reason: str | None = None
    text_pending: int = 0
    text_moved_ms: int = 0
    completion_tokens: int = 0
    first_token_ms: int | None = None
    stages_ms: dict[str, int] = field(default_factory=dict)
    prefill_queue_us: int = 0
    prefill_busy_us: int = 0
    decode_busy_us: int = 0
    copy_us: int = 0
    digest_us: int = 0
    lane_gap_us: int | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // 4

    @property
    def total_tokens(self) -> int:
        """Positions that the job may need in the end."""
        return self.prompt_tokens + self.sampling.max_tokens

    @property
    def keep_token(self) -> bool:
        return self.first_token is not None

    @property
    def known_to_compute(self) -> bool:
        """Whether compute may hold a sampler for the job."""
        return not self.stages_ms.keys().isdisjoint((JobState.PREFILLED, JobState.LOCAL_PREFILLING))

    @property
    def importable(self) -> bool:
        """Prefilled, its first token is known, and no stop string can still end the job at that token."""
        decided = self.text_pending == 0 or not self.sampling.stop
        return self.state is JobState.PREFILLED and self.first_token is not None and decided

    def advance(self, event: JobEvent, now_ms: int) -> None:
        """Follow the table and book the time spent in the state that ends."""
        stage = str(self.state)
        self.state = advance(JOB_TRANSITIONS, self.state, event)
        self.stages_ms[stage] = self.stages_ms.get(stage, 0) + now_ms - self.since_ms
        self.since_ms = now_ms

    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.completion_tokens)

    def timings(self) -> Timings:
        """Where the time of an ended job went; the stages sum to the total."""
        return Timings(
            total_ms=sum(self.stages_ms.values()),
            first_token_ms=self.first_token_ms,
            stages_ms=dict(self.stages_ms),
            prefill_queue_us=self.prefill_queue_us,
            prefill_busy_us=self.prefill_busy_us,
            decode_busy_us=self.decode_busy_us,
            copy_us=self.copy_us,
            digest_us=self.digest_us,
            lane_gap_us=self.lane_gap_us,
        )
