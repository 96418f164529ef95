"""A job from admission to its one terminal answer.

Decides nothing: the record that the core keeps and changes, and where its time went. It must never hold KV,
text or sampler state; those live with the threads that use them, under the job's id.
"""

from dataclasses import dataclass, field

from common.client_messages import Timings, Usage
from common.errors import ErrorCode
from common.lifecycle import JOB_TRANSITIONS, JobEvent, JobState, advance
from common.messages import PrefillDone
from common.prefix_index import HeldPrefix
from common.sampling import SamplingParams
from decode_node.record import Expected
from decode_node.slots import Reservation

_IN_LANE = (JobState.IMPORTING, JobState.LOCAL_PREFILLING, JobState.DECODING)


@dataclass(slots=True)
class Job:
    """One accepted or arriving job.

    order: its place in the queue, kept when it comes back. text_pending: tokens pushed to the text thread
    that it has not accounted for yet. text_moved_ms: when the first of them came, or the text thread last
    answered. keep_token: its first token was emitted, a later prefill must not sample another. kv_here: its
    slot is READY. sampling_first: its first token is being sampled. lost: why its KV will not come; the
    policy decides once that token is known. cache_digest, prefix: whose KV it may share, and what it holds of
    the prefix cache. expected: what its production was asked for. generated: ids sampled so far, kept
    where there is a prefix cache. choice: which of its answers is being made; reasons: how those before it
    ended. sent_to: the prefill node that its prompt last went to.
    """

    job_id: str
    client: str
    label: str
    order: int
    arrival_ms: int
    since_ms: int
    state: JobState = JobState.TOKENIZING
    cache_salt: str | None = None
    cache_digest: bytes = b""
    prefix: HeldPrefix | None = None
    expected: Expected | None = None
    cached_tokens_decode: int = 0
    cached_tokens_prefill: int = 0
    generated: list[int] = field(default_factory=list)
    prompt: bytes = b""
    prompt_digest: str = ""
    shorter_digest: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    reservation: Reservation | None = None
    record: PrefillDone | None = None
    kv_here: bool = False
    sampling_first: bool = False
    lost: tuple[ErrorCode, str] | None = None
    lane: int | None = None
    first_token: int | None = None
    force_local: bool = False
    sent_to: str | None = None
    retries: int = 0
    choice: int = 0
    reasons: list[str] = field(default_factory=list)
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
    convert_us: int = 0
    transfer_us: int = 0
    transfer_exposed_us: int = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // 4

    @property
    def prompt_to_sampler(self) -> bytes:
        """What the sampler has to know of the prompt: nothing, unless its tokens are penalized too."""
        return self.prompt if self.sampling.repetition_penalty != 1 else b""

    @property
    def last_prompt_token(self) -> int:
        return int.from_bytes(self.prompt[-4:], "little")

    @property
    def total_tokens(self) -> int:
        """Positions that the job may need in the end."""
        return self.prompt_tokens + self.sampling.max_tokens

    @property
    def remote_ms(self) -> int:
        """What a prompt took that was computed elsewhere, waits for compute and lane left out."""
        in_lane_us = self.copy_us + self.digest_us - self.prefill_queue_us
        return max(0, self.stages_ms[JobState.PREFILLING] + in_lane_us // 1_000)

    @property
    def occupied_ms(self) -> int:
        """How long the job has had a lane."""
        return sum(self.stages_ms.get(state, 0) for state in _IN_LANE)

    @property
    def keep_token(self) -> bool:
        return self.first_token is not None

    @property
    def many(self) -> bool:
        """Whether the job wants several answers; all of them are made in its lane."""
        return self.sampling.n > 1

    @property
    def choices_left(self) -> bool:
        """Whether another answer follows the one that is being made."""
        return self.choice + 1 < self.sampling.n

    @property
    def known_to_compute(self) -> bool:
        """Whether compute may hold a sampler for the job."""
        return not self.stages_ms.keys().isdisjoint((JobState.PREFILLED, JobState.LOCAL_PREFILLING))

    @property
    def importable(self) -> bool:
        """Prefilled, all KV is here, its first token is known, and no stop string can still end the job at
        that token. Without logits the lane will tell the first token."""
        decided = self.text_pending == 0 or not self.sampling.stop
        told = self.expected is not None and (self.many or not self.expected.vocab_size)
        known = (self.first_token is not None and decided) or told
        return self.state is JobState.PREFILLED and self.kv_here and known

    def advance(self, event: JobEvent, now_ms: int) -> None:
        """Follow the table and book the time spent in the state that ends."""
        stage = str(self.state)
        self.state = advance(JOB_TRANSITIONS, self.state, event)
        self.stages_ms[stage] = self.stages_ms.get(stage, 0) + now_ms - self.since_ms
        self.since_ms = now_ms

    def usage(self) -> Usage:
        return Usage(
            self.prompt_tokens,
            self.completion_tokens,
            self.cached_tokens_decode,
            self.cached_tokens_prefill,
        )

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
            convert_us=self.convert_us,
            transfer_us=self.transfer_us,
            transfer_exposed_us=self.transfer_exposed_us,
        )
