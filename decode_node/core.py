"""The decode node's decisions.

Decides how a queued job comes by its KV, when it gets a lane, and what follows from every word of the prefill
node and of compute. Called by the node's stack through `step`; it must never touch a socket, a clock, a
thread, text or KV bytes. Jobs and clients are kept by `decode_node.desk`, slots by `decode_node.worker`, what
comes next is asked of `decode_node.scheduler`.

Compute answers every command; a lane that it works in stays taken until it has said that it let go, even when
the job is long gone. The answers of jobs that have ended change nothing else.
"""

from collections.abc import Callable
from typing import Any

from common.errors import ErrorCode, ExitStatus, check
from common.lifecycle import JobEvent, JobState, LaneEvent
from common.messages import PrefillDone, PrefillFailed, StatusReply, StatusRequest
from decode_node import events as ev
from decode_node.compute_watch import ComputeWatch
from decode_node.desk import JobDesk
from decode_node.invariants import check_decode_core
from decode_node.jobs import Job
from decode_node.lanes import Lane, Lanes
from decode_node.record import record_problem
from decode_node.scheduler import Decision, ImportInto, PrefillLocally, Route, Scheduler, SendPrefill
from decode_node.settings import DecodeSettings
from decode_node.status import HANDOFF_COUNTERS, decode_status
from decode_node.worker import Worker


class DecodeCore:
    """All state of the decode node; `step` is the only way to change it."""

    def __init__(
        self,
        settings: DecodeSettings,
        route: Route,
        new_session_id: Callable[[], str],
        new_job_id: Callable[[], str],
    ) -> None:
        """Raises ValueError for a route that cannot support the prefetch it asks for."""
        self.settings = settings
        self.route = route
        self.scheduler = Scheduler(route)
        self.lanes = Lanes(route.slots)
        self.worker = Worker(settings.dead_after_ms)
        self.desk = JobDesk(settings, self.scheduler, self.worker, self.lanes, new_session_id, new_job_id)
        self.refusal = ""
        self.counters = dict.fromkeys(HANDOFF_COUNTERS, 0)
        self.watch = ComputeWatch(settings.stall_ms, self.lanes)
        self._drain_deadline_ms: int | None = None
        self._exited = False
        self._handlers = {
            ev.ClientHello: self.desk.on_client_hello,
            ev.ClientLost: self.desk.on_client_lost,
            ev.ClientMessage: self._on_client_message,
            ev.ClientMistake: self.desk.on_client_mistake,
            ev.SubmissionPrepared: self.desk.on_prepared,
            ev.SubmissionRefused: self.desk.on_refused,
            ev.TextProduced: self.desk.on_text,
            ev.TextFailed: self.desk.on_text_failed,
            ev.WorkerOpened: self._on_worker_opened,
            ev.WorkerRefused: self._on_worker_refused,
            ev.WorkerLost: self._on_worker_lost,
            ev.WorkerSuspected: self.worker.on_suspected,
            ev.WorkerMessage: self._on_worker_message,
            ev.FirstTokenSampled: self._on_first_token,
            ev.LogitsRefused: self._on_logits_refused,
            ev.ImportEnded: self._on_import_ended,
            ev.LocalChunkComputed: self._on_local_chunk,
            ev.LocalPrefillEnded: self._on_local_prefill_ended,
            ev.TokenSampled: self._on_token,
            ev.LaneStopped: self._on_lane_stopped,
            ev.LaneFailed: self._on_lane_failed,
            ev.StopRequested: self._on_stop_requested,
            ev.TimePassed: self._on_time_passed,
        }

    def step(self, event: Any, now_ms: int) -> list[Any]:
        """The only door. Effects: those of `decode_node.events`."""
        if self._exited:
            return []
        was_computing = self.watch.owes
        effects = self._handlers[type(event)](event, now_ms)
        effects += self._schedule(now_ms)
        if self.watch.owes and not was_computing:
            self.watch.began(now_ms)
        return effects + self._exit_when_drained()

    def deadline_ms(self) -> int | None:
        """When `step(TimePassed)` is due at the latest."""
        deadlines = [
            self.desk.timers.deadline_ms(),
            self.worker.deadline_ms(),
            self.watch.deadline_ms(),
            self._drain_deadline_ms,
        ]
        head = self.scheduler.head()
        if head is not None and self.scheduler.must_wait(head, self.worker.usable):
            deadlines.append(self._wait_deadline_ms(head))
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    @property
    def idle(self) -> bool:
        """Nothing is held, owed, copied or generated."""
        lanes_idle = self.lanes.free_count == self.lanes.count
        return not self.desk.live() and lanes_idle and self.worker.ledger.idle

    @property
    def accepting(self) -> bool:
        """Whether a job sent now would be taken and, as far as is known, computed."""
        ready = self.route.local_allowed or self.worker.usable
        return ready and not self.desk.draining

    def status(self, now_ms: int) -> dict[str, Any]:
        """Plain values for STATUS."""
        return decode_status(self, now_ms)

    def check(self) -> None:
        """Raise `InvariantViolation` when the parts of the state contradict each other."""
        check_decode_core(self)

    def _on_client_message(self, event: ev.ClientMessage, now_ms: int) -> list[Any]:
        if isinstance(event.message, StatusRequest):
            return [ev.SendToClient(event.session, StatusReply(self.status(now_ms)))]
        return self.desk.on_message(event.session, event.message, now_ms)

    def _on_worker_opened(self, event: ev.WorkerOpened, now_ms: int) -> list[Any]:
        self.refusal = ""
        self.worker.opened(event.hello_ok, now_ms)
        return []

    def _on_worker_refused(self, event: ev.WorkerRefused, now_ms: int) -> list[Any]:
        self.refusal = event.refusal.detail
        if event.refusal.temporary or self.worker.counters["sessions"] > 0:
            return []
        return self._leave(ExitStatus.REFUSED, ErrorCode.NO_PREFILL_NODE, self.refusal, now_ms)

    def _on_worker_lost(self, event: ev.WorkerLost, now_ms: int) -> list[Any]:
        lost, effects = self.worker.lost(event.session, now_ms)
        for job_id in lost:
            job = self.desk.get(job_id)
            check(job is not None, "INV-2: a slot was PRODUCING for a job that has ended")
            job.reservation = None
            self.desk.timers.cancel(job_id, "prefill")
            detail = f"the prefill node was lost while it computed this prompt ({event.cause})"
            effects += self._prefill_failed(job, ErrorCode.PEER_LOST, detail, now_ms)
        return effects

    def _on_worker_message(self, event: ev.WorkerMessage, now_ms: int) -> list[Any]:
        completion, effects = self.worker.receive(event.session, event.message, now_ms)
        if completion is None:
            return effects
        job = self.desk.get(completion.job_id)
        check(job is not None, "INV-2: a slot was PRODUCING for a job that has ended")
        self.desk.timers.cancel(job.job_id, "prefill")
        if isinstance(completion.message, PrefillDone):
            return effects + self._on_record(job, completion.message, now_ms)
        return effects + self._on_prefill_refused(job, completion.message, now_ms)

    def _on_record(self, job: Job, record: PrefillDone, now_ms: int) -> list[Any]:
        job.record = record
        job.prefill_queue_us, job.prefill_busy_us = record.queue_us, record.compute_us
        job.advance(JobEvent.RECORD_ARRIVED, now_ms)
        problem = record_problem(record, job, self.settings)
        if problem is not None:
            return self._kv_refused(job, ErrorCode.KV_CORRUPT, problem, now_ms)
        self.scheduler.hold(job)
        self.watch.asked_to_sample(job.job_id)
        return [ev.SampleFirst(job.job_id, record, job.sampling)]

    def _on_prefill_refused(self, job: Job, failure: PrefillFailed, now_ms: int) -> list[Any]:
        job.reservation = None
        if failure.code is ErrorCode.DRAINING and not self.desk.draining:
            self.desk.requeue(job, now_ms)
            return []
        self.counters["kv_refused"] += failure.code is ErrorCode.KV_CORRUPT
        telling = (ErrorCode.PREFILL_TIMEOUT, ErrorCode.KV_CORRUPT)
        code = failure.code if failure.code in telling else ErrorCode.PREFILL_ERROR
        detail = f"the prefill node says {failure.code}: {failure.detail}"
        return self._prefill_failed(job, code, detail, now_ms)

    def _kv_refused(self, job: Job, code: ErrorCode, detail: str, now_ms: int) -> list[Any]:
        """No token may come from this production: let it go and follow the policy."""
        self.counters["kv_refused"] += 1
        effects = self.desk.detach(job, str(code), now_ms)
        return effects + self._prefill_failed(job, code, detail, now_ms)

    def _prefill_failed(self, job: Job, code: ErrorCode, detail: str, now_ms: int) -> list[Any]:
        """`--on-prefill-failure`, for a job that holds neither slot nor lane any more."""
        if self.route.on_prefill_failure == "local" and not self.desk.draining:
            job.force_local = True
            self.desk.requeue(job, now_ms)
            return []
        return self.desk.fail(job, code, detail, now_ms)

    def _on_first_token(self, event: ev.FirstTokenSampled, now_ms: int) -> list[Any]:
        self.watch.answered(now_ms, event.job_id)
        job = self.desk.get(event.job_id)
        if job is None:
            return []
        job.first_token = event.token_id
        effects: list[Any] = [self.desk.push(job, event.token_id, event.finish_reason)]
        if event.finish_reason is not None:
            job.advance(JobEvent.LAST_TOKEN, now_ms)
            effects += self.desk.detach(job, "finished at its first token", now_ms)
        return effects

    def _on_logits_refused(self, event: ev.LogitsRefused, now_ms: int) -> list[Any]:
        self.watch.answered(now_ms, event.job_id)
        job = self.desk.get(event.job_id)
        return [] if job is None else self._kv_refused(job, event.code, event.detail, now_ms)

    def _on_import_ended(self, event: ev.ImportEnded, now_ms: int) -> list[Any]:
        self.watch.answered(now_ms)
        lane = self.lanes[event.lane]
        effects = self.worker.copy_ended(lane.reservation, now_ms)
        lane.reservation = None
        job = self.desk.get(event.job_id)
        self.lanes.advance(lane, LaneEvent.DECODE_STARTED if event.decoding else LaneEvent.VACATED)
        if job is None:
            return effects + (self.desk.stop_lane(lane) if event.decoding else [])
        job.reservation = None
        job.copy_us, job.digest_us = event.copy_us, event.digest_us
        if event.code is not None:
            job.lane = None
            self.counters["kv_refused"] += 1
            return effects + self._prefill_failed(job, event.code, event.detail, now_ms)
        check(event.decoding, "compute forgot a job that lives")
        self.counters["remote_imports"] += 1
        self._decode_started(job, now_ms)
        return effects

    def _decode_started(self, job: Job, now_ms: int) -> None:
        job.advance(JobEvent.DECODE_STARTED, now_ms)
        job.record = None

    def _start_decode(self, job: Job, lane: Lane, now_ms: int) -> list[Any]:
        self.lanes.advance(lane, LaneEvent.DECODE_STARTED)
        self._decode_started(job, now_ms)
        return [ev.StartDecode(job.job_id, lane.index, job.first_token)]

    def _on_local_chunk(self, event: ev.LocalChunkComputed, now_ms: int) -> list[Any]:
        self.watch.answered(now_ms)
        return []

    def _on_local_prefill_ended(self, event: ev.LocalPrefillEnded, now_ms: int) -> list[Any]:
        self.watch.answered(now_ms)
        job = self.desk.get(event.job_id)
        if job is None:
            return []  # its lane is STOPPING, LaneStopped follows
        lane = self.lanes[event.lane]
        job.path = "local"
        job.prefill_busy_us += event.busy_us
        self.counters["local_prefill_tokens"] += job.prompt_tokens
        if event.token_id is None:
            return self._start_decode(job, lane, now_ms)
        job.first_token = event.token_id
        push = self.desk.push(job, event.token_id, event.finish_reason)
        if event.finish_reason is None:
            return [push, *self._start_decode(job, lane, now_ms)]
        self._vacate(job, lane, now_ms)
        return [push]

    def _on_token(self, event: ev.TokenSampled, now_ms: int) -> list[Any]:
        self.watch.answered(now_ms)
        job = self.desk.get(event.job_id)
        if job is None:
            return []  # its lane is STOPPING, LaneStopped follows
        job.decode_busy_us += event.busy_us
        if event.lane_gap_us is not None:
            job.lane_gap_us = event.lane_gap_us
        push = self.desk.push(job, event.token_id, event.finish_reason)
        if event.finish_reason is not None:
            self._vacate(job, self.lanes[event.lane], now_ms)
        return [push]

    def _vacate(self, job: Job, lane: Lane, now_ms: int) -> None:
        """The job has its last token; its lane is free while the text is flushed."""
        self.lanes.advance(lane, LaneEvent.VACATED)
        job.lane = None
        job.advance(JobEvent.LAST_TOKEN, now_ms)

    def _on_lane_stopped(self, event: ev.LaneStopped, now_ms: int) -> list[Any]:
        self.watch.answered(now_ms)
        self.lanes.advance(self.lanes[event.lane], LaneEvent.VACATED)
        return []

    def _on_lane_failed(self, event: ev.LaneFailed, now_ms: int) -> list[Any]:
        self.watch.answered(now_ms)
        job = self.desk.get(event.job_id)
        if job is None:
            return []  # its lane is STOPPING, LaneStopped follows
        self.lanes.advance(self.lanes[event.lane], LaneEvent.VACATED)
        job.lane = None
        return self.desk.fail(job, ErrorCode.ENGINE_ERROR, event.detail, now_ms)

    def _schedule(self, now_ms: int) -> list[Any]:
        effects: list[Any] = []
        while True:
            decision = self.scheduler.decide(self.lanes, self.worker.ledger, self.worker.usable)
            if decision is None:
                return effects
            effects += self._apply(decision, now_ms)

    def _apply(self, decision: Decision, now_ms: int) -> list[Any]:
        match decision:
            case ImportInto(job=job, lane=lane):
                lane.reservation = job.reservation
                self.worker.import_started(job.reservation, now_ms)
                self._occupy(job, lane, LaneEvent.IMPORT_STARTED)
                job.advance(JobEvent.IMPORT_STARTED, now_ms)
                session = job.reservation.session
                return [ev.StartImport(job.job_id, lane.index, session, job.record, job.first_token)]
            case PrefillLocally(job=job, lane=lane):
                self._occupy(job, lane, LaneEvent.PREFILL_STARTED)
                self.desk.leave_queue(job, JobEvent.LOCAL_PREFILL_STARTED, now_ms)
                return [
                    ev.StartLocalPrefill(job.job_id, lane.index, job.prompt, job.sampling, job.keep_token)
                ]
            case SendPrefill():
                return self._send_prefill(decision, now_ms)

    def _occupy(self, job: Job, lane: Lane, event: LaneEvent) -> None:
        self.lanes.advance(lane, event, job.job_id)
        job.lane = lane.index

    def _send_prefill(self, decision: SendPrefill, now_ms: int) -> list[Any]:
        job = decision.job
        if job.total_tokens > self.desk.token_limit:
            detail = f"{job.total_tokens} tokens do not fit this pair's limit of {self.desk.token_limit}"
            return self.desk.fail(job, ErrorCode.CONTEXT_LENGTH_EXCEEDED, detail, now_ms)
        budget_ms = self.settings.prefill_timeout_ms
        job.reservation, effects = self.worker.send_prefill(
            decision.slot, job.job_id, job.prompt, job.prompt_digest, budget_ms, now_ms
        )
        self.desk.leave_queue(job, JobEvent.PREFILL_SENT, now_ms)
        self.desk.timers.set(now_ms + budget_ms, job.job_id, "prefill")
        self.counters["prefetches"] += decision.prefetch
        return effects

    def _wait_deadline_ms(self, job: Job) -> int:
        return max(job.since_ms, self.worker.unusable_since_ms) + self.settings.prefill_wait_ms

    def _on_time_passed(self, event: ev.TimePassed, now_ms: int) -> list[Any]:
        if self.watch.hung(now_ms):
            detail = f"compute made no progress for {self.settings.stall_ms} ms"
            return self._leave(ExitStatus.HUNG, ErrorCode.ENGINE_HUNG, detail, now_ms)
        if self._drain_deadline_ms is not None and now_ms >= self._drain_deadline_ms:
            detail = f"not finished within --drain-ms {self.settings.drain_ms}"
            return self._leave(ExitStatus.DRAIN_INCOMPLETE, ErrorCode.DRAIN_TIMEOUT, detail, now_ms)
        effects = self.worker.expire(now_ms)
        for job_id, kind in self.desk.timers.take_due(now_ms):
            effects += self._on_job_deadline(job_id, kind, now_ms)
        while (head := self.scheduler.head()) is not None and self.scheduler.must_wait(
            head, self.worker.usable
        ):
            if now_ms < self._wait_deadline_ms(head):
                break
            reason = f" ({self.refusal})" if self.refusal else ""
            detail = f"no prefill node was usable for {self.settings.prefill_wait_ms} ms{reason}"
            effects += self.desk.fail(head, ErrorCode.NO_PREFILL_NODE, detail, now_ms)
        return effects

    def _on_job_deadline(self, job_id: str, kind: str, now_ms: int) -> list[Any]:
        job = self.desk.get(job_id)
        if job is None:
            return []
        if kind == "prefill":
            detail = f"no completion within --prefill-timeout-ms {self.settings.prefill_timeout_ms}"
            effects = self.desk.detach(job, "prefill timeout", now_ms)
            return effects + self._prefill_failed(job, ErrorCode.PREFILL_TIMEOUT, detail, now_ms)
        detail = f"not finished within --job-timeout-ms {self.settings.job_timeout_ms}, while {job.state}"
        return self.desk.fail(job, ErrorCode.JOB_TIMEOUT, detail, now_ms)

    def _on_stop_requested(self, event: ev.StopRequested, now_ms: int) -> list[Any]:
        if self.desk.draining:
            return []
        self.desk.draining = True
        self._drain_deadline_ms = now_ms + self.settings.drain_ms
        effects = []
        for job in self.desk.live():
            if job.state in (JobState.TOKENIZING, JobState.QUEUED):
                code = ErrorCode.DRAIN_TIMEOUT if job.keep_token else ErrorCode.SHUTTING_DOWN
                effects += self.desk.fail(job, code, "this decode node is shutting down", now_ms)
        return effects

    def _exit_when_drained(self) -> list[Any]:
        if not self.desk.draining or self._exited or not self.idle:
            return []
        return self._goodbye(ExitStatus.OK, "drained")

    def _leave(self, status: ExitStatus, code: ErrorCode, detail: str, now_ms: int) -> list[Any]:
        """Answer every job and go, whatever is still owed."""
        return self.desk.fail_all(code, detail, now_ms) + self._goodbye(status, detail)

    def _goodbye(self, status: ExitStatus, reason: str) -> list[Any]:
        self._exited = True
        closing = [ev.CloseClient(session, reason) for session in self.desk.clients.sessions]
        return [*closing, ev.LeaveWorker(reason), ev.ExitNode(status, reason)]
