"""The hand-off of one job: from the PREFILL that is sent to verified KV in a lane.

Decides what follows from every word of a prefill node, from the first token and from the end of a copy, and
applies `--on-prefill-failure` when the work was in vain. Part of the decode core, called by it alone. It must
never let a token come from a record or a copy that was not verified, and never look a job up by anything but
the reservation that a completion names.
"""

from typing import Any

from common.compatibility import wire_layout
from common.errors import ErrorCode, check
from common.lifecycle import JobEvent, LaneEvent
from common.messages import NodeProfile, PrefillDone, PrefillFailed
from decode_node import commands
from decode_node import events as ev
from decode_node.desk import JobDesk
from decode_node.jobs import Job
from decode_node.lane_work import LaneWork
from decode_node.prefix_cache import PrefixCache
from decode_node.record import Expected, record_problem
from decode_node.scheduler import ImportInto, Route, Scheduler, SendPrefill
from decode_node.settings import DecodeSettings
from decode_node.workers import Workers
from transport.bulk import ChunksLanded

COUNTERS = ("remote_imports", "prefetches", "kv_refused", "prefill_retries")
# What a prefill node says about a failure that its client can make more of than of PREFILL_ERROR.
_TELLING = (ErrorCode.PREFILL_TIMEOUT, ErrorCode.KV_CORRUPT)


class Handoff:
    """Remote prefill of all jobs."""

    def __init__(
        self,
        settings: DecodeSettings,
        route: Route,
        scheduler: Scheduler,
        workers: Workers,
        desk: JobDesk,
        lane_work: LaneWork,
        cache: PrefixCache,
    ) -> None:
        self._settings = settings
        self._route = route
        self._scheduler = scheduler
        self._workers = workers
        self._desk = desk
        self._lane_work = lane_work
        self._cache = cache
        self._lanes = lane_work.lanes
        self._watch = lane_work.watch
        self._pace = scheduler.pace
        self.counters = dict.fromkeys(COUNTERS, 0)

    def send_prefill(self, decision: SendPrefill, now_ms: int) -> list[Any]:
        """Carry out the scheduler's word."""
        job, budget_ms = decision.job, self._settings.prefill_timeout_ms
        worker = self._workers.of(decision.slot.session)
        limit = min(self._desk.token_limit, worker.max_tokens)
        if job.total_tokens > limit:
            detail = f"{job.total_tokens} tokens do not fit this pair's limit of {limit}"
            return self._desk.fail(job, ErrorCode.CONTEXT_LENGTH_EXCEEDED, detail, now_ms)
        prompt = self._handed_prompt(job, worker.profile)
        job.reservation, effects = worker.send_prefill(
            decision.slot,
            job.job_id,
            prompt,
            job.expected.prompt_digest,
            budget_ms,
            now_ms,
            job.expected.send_from,
            job.cache_digest,
            urgent=not decision.prefetch,
        )
        job.sent_to = worker.name
        self._workers.note_sent(job, worker)
        self._desk.leave_queue(job, JobEvent.PREFILL_SENT, now_ms)
        self._desk.timers.set(now_ms + budget_ms, job.job_id, "prefill")
        self.counters["prefetches"] += decision.prefetch
        return effects

    def _handed_prompt(self, job: Job, profile: NodeProfile) -> bytes:
        """What is sent of the prompt, and from now on expected of the record.

        An engine without logits gets all but the last token, which the lane will compute.
        """
        prompt, digest = job.prompt, job.prompt_digest
        if not profile.answers_logits:
            prompt = prompt[:-4]
            digest = job.shorter_digest
        token_count = len(prompt) // 4
        job.expected = Expected(
            digest,
            token_count,
            min(self._cache.hold(job), token_count - 1),
            wire_layout(profile).token_bytes,
            profile.vocab_size if profile.answers_logits else 0,
        )
        return prompt

    def start_import(self, decision: ImportInto, now_ms: int) -> list[Any]:
        """Carry out the scheduler's word."""
        job, lane = decision.job, decision.lane
        lane.reservation = job.reservation
        self._workers.holder(job.reservation).import_started(job.reservation, now_ms)
        self._lane_work.occupy(job, lane, LaneEvent.IMPORT_STARTED)
        job.advance(JobEvent.IMPORT_STARTED, now_ms)
        self._cache.move_to(lane, job)
        places = () if lane.prefix is None else lane.prefix.places
        told = job.expected.vocab_size > 0 and not job.many
        start = commands.StartImport(
            job.job_id,
            lane.index,
            job.reservation.session,
            job.record,
            job.first_token if told else job.last_prompt_token,
            job.expected.send_from,
            places,
            None if told else job.sampling,
            None if told else job.first_token,
            job.prompt_to_sampler,
        )
        return [start]

    def on_worker_lost(self, event: ev.WorkerLost, now_ms: int) -> list[Any]:
        worker = self._workers.get(event.worker)
        lost, effects = self._workers.lost(event.worker, event.session, now_ms)
        for job_id in lost:
            job = self._owner(job_id)
            job.reservation = None
            detail = f"prefill node {worker.name} was lost before this prompt's KV was here ({event.cause})"
            if job.sampling_first:
                # Its logits are verified: what comes of them decides whether there is a token to keep.
                job.lost = ErrorCode.PEER_LOST, detail
            else:
                effects += self._prefill_failed(job, ErrorCode.PEER_LOST, detail, now_ms)
        return effects

    def on_worker_message(self, event: ev.WorkerMessage, now_ms: int) -> list[Any]:
        completion, effects = self._workers.receive(event.session, event.message, now_ms)
        if completion is None:
            return effects
        job = self._owner(completion.job_id)
        if isinstance(completion.message, PrefillDone):
            return effects + self._on_record(job, completion.message, completion.kv_here, now_ms)
        return effects + self._on_failure(job, completion.message, now_ms)

    def on_kv_landed(self, event: ChunksLanded, now_ms: int) -> list[Any]:
        job_id, effects = self._workers.kv_landed(event, now_ms)
        if job_id is not None:
            job = self._desk.get(job_id)
            job.kv_here = True
            # Its record was here first: what came after that was not hidden behind anything.
            job.transfer_exposed_us += 1_000 * (now_ms - job.since_ms)
        return effects

    def on_first_token(self, event: ev.FirstTokenSampled, now_ms: int) -> list[Any]:
        self._watch.answered(now_ms, event.job_id)
        job = self._desk.get(event.job_id)
        if job is None:
            return []
        job.sampling_first = False
        job.first_token = event.token_id
        self._cache.note(job, event.token_id)
        effects: list[Any] = [self._desk.push(job, event, now_ms)]
        if event.finish_reason is not None:
            job.advance(JobEvent.LAST_TOKEN, now_ms)
            return effects + self._desk.detach(job, "finished at its first token", now_ms)
        return effects + self._fail_if_lost(job, now_ms)

    def on_logits_refused(self, event: ev.LogitsRefused, now_ms: int) -> list[Any]:
        self._watch.answered(now_ms, event.job_id)
        job = self._desk.get(event.job_id)
        if job is None:
            return []
        job.sampling_first, job.lost = False, None
        return self._kv_refused(job, event.code, event.detail, now_ms)

    def on_import_ended(self, event: ev.ImportEnded, now_ms: int) -> list[Any]:
        self._watch.answered(now_ms)
        lane = self._lanes[event.lane]
        effects = self._workers.holder(lane.reservation).copy_ended(lane.reservation, now_ms)
        lane.reservation = None
        if event.corrupt_place is not None:
            self._cache.forget(lane, event.corrupt_place)
        self._cache.let_go(lane)
        job = self._desk.get(event.job_id)
        self._lanes.advance(lane, LaneEvent.DECODE_STARTED if event.decoding else LaneEvent.VACATED)
        if job is None:
            return effects + (self._desk.stop_lane(lane) if event.decoding else [])
        job.reservation = None
        job.copy_us, job.digest_us = event.copy_us, event.digest_us
        job.convert_us += event.convert_us
        if event.code is not None:
            job.lane = None
            self.counters["kv_refused"] += 1
            if event.corrupt_place is not None:
                self._desk.requeue(job, now_ms)  # no fault of the prefill node, and it cannot come again
                return effects
            return effects + self._prefill_failed(job, event.code, event.detail, now_ms)
        check(event.decoding, "compute forgot a job that lives")
        self.counters["remote_imports"] += 1
        job.cached_tokens_decode = job.expected.send_from
        self._lane_work.decode_started(job, now_ms)
        self._pace.imported(job.expected.token_count - job.expected.send_from, job.remote_ms)
        if job.many:
            effects.append(self._desk.start_choice(job))
        return effects + self._cache.keep(job, lane, job.expected.token_count)

    def on_timeout(self, job: Job, now_ms: int) -> list[Any]:
        """`--prefill-timeout-ms` has passed since the job's PREFILL."""
        worker = self._workers.holder(job.reservation)
        budget_ms = self._settings.prefill_timeout_ms
        detail = f"no completion of prefill node {worker.name} within --prefill-timeout-ms {budget_ms}"
        effects = self._desk.detach(job, "prefill timeout", now_ms)
        return effects + self._prefill_failed(job, ErrorCode.PREFILL_TIMEOUT, detail, now_ms)

    def _owner(self, job_id: str) -> Job:
        """The live job whose production has come to an end."""
        job = self._desk.get(job_id)
        check(job is not None, "INV-2: a slot was PRODUCING for a job that has ended")
        self._desk.timers.cancel(job_id, "prefill")
        return job

    def _fail_if_lost(self, job: Job, now_ms: int) -> list[Any]:
        """The KV of a job was lost while its first token was sampled: now the policy decides."""
        if job.lost is None:
            return []
        (code, detail), job.lost = job.lost, None
        return self._prefill_failed(job, code, detail, now_ms)

    def _on_record(self, job: Job, record: PrefillDone, kv_here: bool, now_ms: int) -> list[Any]:
        job.record, job.kv_here = record, kv_here
        job.prefill_queue_us, job.prefill_busy_us = record.queue_us, record.compute_us
        job.cached_tokens_prefill = record.cached_tokens
        job.convert_us = record.convert_us
        job.transfer_us, job.transfer_exposed_us = record.transfer_us, record.transfer_exposed_us
        job.advance(JobEvent.RECORD_ARRIVED, now_ms)
        self._pace.produced(record.compute_us + record.convert_us, record.transfer_exposed_us)
        problem = record_problem(record, job.expected)
        if problem is not None:
            return self._kv_refused(job, ErrorCode.KV_CORRUPT, problem, now_ms)
        self._scheduler.hold(job)
        if job.keep_token or job.many or not job.expected.vocab_size:
            # The token is of an earlier attempt, and the client may have it; or the lane will tell it.
            return []
        self._watch.asked_to_sample(job.job_id)
        job.sampling_first = True
        return [commands.SampleFirst(job.job_id, record, job.sampling, job.prompt_to_sampler)]

    def _on_failure(self, job: Job, failure: PrefillFailed, now_ms: int) -> list[Any]:
        job.reservation = None
        if failure.code is ErrorCode.DRAINING and not self._desk.draining:
            self._desk.requeue(job, now_ms)
            return []
        self.counters["kv_refused"] += failure.code is ErrorCode.KV_CORRUPT
        code = failure.code if failure.code in _TELLING else ErrorCode.PREFILL_ERROR
        detail = f"the prefill node says {failure.code}: {failure.detail}"
        return self._prefill_failed(job, code, detail, now_ms)

    def _kv_refused(self, job: Job, code: ErrorCode, detail: str, now_ms: int) -> list[Any]:
        """No token may come from this production: let it go and follow the policy."""
        self.counters["kv_refused"] += 1
        effects = self._desk.detach(job, str(code), now_ms)
        return effects + self._prefill_failed(job, code, detail, now_ms)

    def _prefill_failed(self, job: Job, code: ErrorCode, detail: str, now_ms: int) -> list[Any]:
        """`--on-prefill-failure`, for a job that holds neither slot nor lane any more."""
        policy = "fail" if self._desk.draining else self._route.on_prefill_failure
        if policy == "local":
            job.force_local = True
        elif policy == "retry" and job.retries < self._settings.prefill_retries:
            job.retries += 1
            self.counters["prefill_retries"] += 1
        else:
            tries = f" (after {job.retries} of --prefill-retries)" if job.retries else ""
            return self._desk.fail(job, code, detail + tries, now_ms)
        self._desk.requeue(job, now_ms)
        return []
