"""What goes on in the lanes: local prefill and decode.

Decides which lane a job occupies and when it leaves it, from the answers of compute. Part of the decode core,
called by it and by the hand-off. Compute answers every command; a lane that it works in stays taken until it
has said that it let go, even when the job is long gone. The answers of jobs that have ended change nothing
else: it must never give a lane away before that word.
"""

from typing import Any

from common.errors import ErrorCode
from common.lifecycle import JobEvent, LaneEvent
from decode_node import commands
from decode_node import events as ev
from decode_node.compute_watch import ComputeWatch
from decode_node.desk import JobDesk
from decode_node.jobs import Job
from decode_node.lanes import Lane, Lanes
from decode_node.pace import Pace
from decode_node.prefix_cache import PrefixCache
from decode_node.scheduler import PrefillLocally


class LaneWork:
    """The lanes' side of all jobs."""

    def __init__(
        self, desk: JobDesk, lanes: Lanes, watch: ComputeWatch, cache: PrefixCache, pace: Pace
    ) -> None:
        self._desk = desk
        self._pace = pace
        self._cache = cache
        self.lanes = lanes
        self.watch = watch
        self.counters = {"local_prefill_tokens": 0}

    def start_local_prefill(self, decision: PrefillLocally, now_ms: int) -> list[Any]:
        """Carry out the scheduler's word."""
        job, lane = decision.job, decision.lane
        self.occupy(job, lane, LaneEvent.PREFILL_STARTED)
        self._desk.leave_queue(job, JobEvent.LOCAL_PREFILL_STARTED, now_ms)
        cached_tokens = self._cache.hold(job)
        self._cache.move_to(lane, job)
        places = () if lane.prefix is None else lane.prefix.places
        start = commands.StartLocalPrefill(
            job.job_id, lane.index, job.prompt, job.sampling, job.keep_token, cached_tokens, places
        )
        return [start]

    def occupy(self, job: Job, lane: Lane, event: LaneEvent) -> None:
        """The job takes a free lane."""
        self.lanes.advance(lane, event, job.job_id)
        job.lane = lane.index

    def decode_started(self, job: Job, now_ms: int) -> None:
        """Compute decodes the job; its record is not needed any more."""
        job.advance(JobEvent.DECODE_STARTED, now_ms)
        job.record = None

    def on_local_chunk(self, event: ev.LocalChunkComputed, now_ms: int) -> list[Any]:
        self.watch.answered(now_ms)
        return []

    def on_local_prefill_ended(self, event: ev.LocalPrefillEnded, now_ms: int) -> list[Any]:
        self.watch.answered(now_ms)
        lane = self.lanes[event.lane]
        if event.corrupt_place is not None:
            self._cache.forget(lane, event.corrupt_place)
        self._cache.let_go(lane)
        job = self._desk.get(event.job_id)
        if job is None:
            return []  # its lane is STOPPING, LaneStopped follows
        job.path = "local"
        job.prefill_busy_us += event.busy_us
        job.cached_tokens_decode = event.cached_tokens
        computed_tokens = job.prompt_tokens - job.cached_tokens_decode
        self.counters["local_prefill_tokens"] += computed_tokens
        self._pace.computed_locally(computed_tokens, event.busy_us)
        if job.many or event.token_id is None:
            return self._start_decode(job, lane, now_ms) + self._cache.keep(job, lane, job.prompt_tokens)
        job.first_token = event.token_id
        self._cache.note(job, event.token_id)
        push = self._desk.push(job, event, now_ms)
        if event.finish_reason is None:
            return [
                push,
                *self._start_decode(job, lane, now_ms),
                *self._cache.keep(job, lane, job.prompt_tokens),
            ]
        return [push, *self._vacate(job, lane, now_ms)]

    def on_token(self, event: ev.TokenSampled, now_ms: int) -> list[Any]:
        self.watch.answered(now_ms)
        job = self._desk.get(event.job_id)
        if job is None:
            return []  # its lane is STOPPING, LaneStopped follows
        job.decode_busy_us += event.busy_us
        if event.choice != job.choice:
            return []  # a stop string had ended that answer
        if event.lane_gap_us is not None:
            job.lane_gap_us = event.lane_gap_us
        if job.first_token is None:
            job.first_token = event.token_id
        self._cache.note(job, event.token_id)
        push = self._desk.push(job, event, now_ms)
        if event.finish_reason is None or job.choices_left:
            return [push]
        return [push, *self._vacate(job, self.lanes[event.lane], now_ms)]

    def on_lane_stopped(self, event: ev.LaneStopped, now_ms: int) -> list[Any]:
        self.watch.answered(now_ms)
        lane = self.lanes[event.lane]
        self._cache.let_go(lane)
        self.lanes.advance(lane, LaneEvent.VACATED)
        return []

    def on_lane_failed(self, event: ev.LaneFailed, now_ms: int) -> list[Any]:
        self.watch.answered(now_ms)
        job = self._desk.get(event.job_id)
        if job is None:
            return []  # its lane is STOPPING, LaneStopped follows
        lane = self.lanes[event.lane]
        self._cache.let_go(lane)
        self.lanes.advance(lane, LaneEvent.VACATED)
        job.lane = None
        return self._desk.fail(job, ErrorCode.ENGINE_ERROR, event.detail, now_ms)

    def _start_decode(self, job: Job, lane: Lane, now_ms: int) -> list[Any]:
        self.lanes.advance(lane, LaneEvent.DECODE_STARTED)
        self.decode_started(job, now_ms)
        if job.many:
            return [self._desk.start_choice(job)]
        return [commands.StartDecode(job.job_id, lane.index, job.first_token)]

    def _vacate(self, job: Job, lane: Lane, now_ms: int) -> list[Any]:
        """The job has its last token; its lane is free while the text is flushed."""
        kept = self._cache.keep(job, lane)
        self.lanes.advance(lane, LaneEvent.VACATED)
        job.lane = None
        job.advance(JobEvent.LAST_TOKEN, now_ms)
        self._pace.lane_released(job.occupied_ms)
        return kept
