"""The decode node's decisions.

Decides what runs next, what a deadline or a signal means for all jobs, and when the node may go. Called by
the node's stack through `step`; it must never touch a socket, a clock, a thread, text or KV bytes. Its parts:
jobs and clients are kept by `decode_node.desk`, prefill nodes and slots by `decode_node.workers`, the way of
a prompt to a lane by `decode_node.handoff`, the lanes by `decode_node.lane_work`; what comes next is asked of
`decode_node.scheduler`.
"""

from collections.abc import Callable
from typing import Any

from common.errors import ErrorCode, ExitStatus
from common.lifecycle import JobState
from common.messages import CacheOrder, StatusReply, StatusRequest
from common.prefix_commands import BlocksStored, CacheFileEnded, CacheHeadsRead
from decode_node import events as ev
from decode_node.cache_orders import CacheOrders
from decode_node.compute_watch import ComputeWatch
from decode_node.desk import JobDesk
from decode_node.handoff import Handoff
from decode_node.invariants import check_decode_core
from decode_node.jobs import Job
from decode_node.lane_work import LaneWork
from decode_node.lanes import Lanes
from decode_node.pace import Pace
from decode_node.prefix_cache import PrefixCache
from decode_node.scheduler import Decision, ImportInto, PrefillLocally, Route, Scheduler, SendPrefill
from decode_node.settings import DecodeSettings
from decode_node.status import decode_status
from decode_node.workers import Workers
from transport.bulk import ChunksLanded, PiecesMoved


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
        self.scheduler = Scheduler(route, Pace(settings.chunk_us, settings.profile.chunk_tokens))
        self.lanes = Lanes(route.slots)
        self.workers = Workers(route.prefill_workers, settings.dead_after_ms)
        self.cache = PrefixCache(settings.prefix)
        parts = self.scheduler, self.workers, self.lanes, self.cache
        self.desk = JobDesk(settings, *parts, new_session_id, new_job_id)
        self.watch = ComputeWatch(settings.stall_ms, self.lanes)
        self.lane_work = LaneWork(self.desk, self.lanes, self.watch, self.cache, self.scheduler.pace)
        self.handoff = Handoff(
            settings, route, self.scheduler, self.workers, self.desk, self.lane_work, self.cache
        )
        has_files = settings.prefix is not None and settings.prefix.files
        self.cache_orders = CacheOrders(self.cache, self.desk.clients, has_files)
        self._drain_deadline_ms: int | None = None
        self._exited = False
        self._handlers = self._handler_table()

    def _handler_table(self) -> dict[type, Callable[[Any, int], list[Any]]]:
        return {
            ev.ClientHello: self.desk.on_client_hello,
            ev.ClientLost: self.desk.on_client_lost,
            ev.ClientMessage: self._on_client_message,
            ev.ClientMistake: self.desk.on_client_mistake,
            ev.SubmissionPrepared: self.desk.on_prepared,
            ev.SubmissionRefused: self.desk.on_refused,
            ev.TextTokenized: self.desk.on_tokenized,
            ev.TokenizeRefused: self.desk.on_tokenize_refused,
            ev.TextProduced: self.desk.on_text,
            ev.TextFailed: self.desk.on_text_failed,
            ev.WorkerOpened: self._on_worker_opened,
            ev.WorkerRefused: self._on_worker_refused,
            ev.WorkerLost: self.handoff.on_worker_lost,
            ev.WorkerSuspected: self.workers.on_suspected,
            ev.WorkerMessage: self.handoff.on_worker_message,
            ChunksLanded: self.handoff.on_kv_landed,
            PiecesMoved: self.workers.on_kv_moved,
            ev.FirstTokenSampled: self.handoff.on_first_token,
            ev.LogitsRefused: self.handoff.on_logits_refused,
            ev.ImportEnded: self.handoff.on_import_ended,
            ev.LocalChunkComputed: self.lane_work.on_local_chunk,
            ev.LocalPrefillEnded: self.lane_work.on_local_prefill_ended,
            ev.TokenSampled: self.lane_work.on_token,
            ev.LaneStopped: self.lane_work.on_lane_stopped,
            ev.LaneFailed: self.lane_work.on_lane_failed,
            BlocksStored: self.cache.on_stored,
            CacheHeadsRead: self.cache_orders.on_heads_read,
            CacheFileEnded: self.cache_orders.on_ended,
            ev.StopRequested: self._on_stop_requested,
            ev.TimePassed: self._on_time_passed,
        }

    def step(self, event: Any, now_ms: int) -> list[Any]:
        """The only door. Effects: those of `decode_node.events`."""
        if self._exited:
            return []
        was_computing = self.watch.owes
        effects = self._handlers[type(event)](event, now_ms)
        effects += self.workers.give_back()
        effects += self._schedule(now_ms)
        if self.watch.owes and not was_computing:
            self.watch.began(now_ms)
        return effects + self._exit_when_drained()

    def deadline_ms(self) -> int | None:
        """When `step(TimePassed)` is due at the latest."""
        deadlines = [
            self.desk.timers.deadline_ms(),
            self.workers.deadline_ms(),
            self.watch.deadline_ms(),
            self._drain_deadline_ms,
        ]
        head = self.scheduler.head()
        if head is not None and self.scheduler.must_wait(head, self.workers):
            deadlines.append(self._wait_deadline_ms(head))
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    @property
    def idle(self) -> bool:
        """Nothing is held, owed, copied or generated."""
        lanes_idle = self.lanes.free_count == self.lanes.count
        return not self.desk.live() and lanes_idle and self.workers.idle and self.cache_orders.idle

    @property
    def accepting(self) -> bool:
        """Whether a job sent now would be taken and, as far as is known, computed."""
        able = self.route.local_allowed or self.workers.usable
        return able and not self.desk.draining

    @property
    def counters(self) -> dict[str, int]:
        """What has happened to all jobs since start."""
        return {**self.desk.counters, **self.handoff.counters, **self.lane_work.counters}

    def progress_count(self) -> int:
        """Answers of compute since start, for PONG."""
        return self.watch.progress

    def status(self, now_ms: int) -> dict[str, Any]:
        """Plain values for STATUS."""
        return decode_status(self, now_ms)

    def check(self) -> None:
        """Raise `InvariantViolation` when the parts of the state contradict each other."""
        check_decode_core(self)

    def _on_client_message(self, event: ev.ClientMessage, now_ms: int) -> list[Any]:
        if isinstance(event.message, StatusRequest):
            return [ev.SendToClient(event.session, StatusReply(self.status(now_ms)))]
        if isinstance(event.message, CacheOrder):
            return self.cache_orders.on_order(event.session, event.message, self.desk.draining)
        return self.desk.on_message(event.session, event.message, now_ms)

    def _on_worker_opened(self, event: ev.WorkerOpened, now_ms: int) -> list[Any]:
        self.workers.get(event.worker).opened(event.hello_ok, now_ms)
        return []

    def _on_worker_refused(self, event: ev.WorkerRefused, now_ms: int) -> list[Any]:
        """A running node never exits for its peer; one that fits no prefill node from the start does."""
        worker = self.workers.get(event.worker)
        worker.refused(event.refusal)
        if not all(known.misfit for known in self.workers):
            return []
        return self._leave(ExitStatus.REFUSED, ErrorCode.NO_PREFILL_NODE, worker.refusal, now_ms)

    def _schedule(self, now_ms: int) -> list[Any]:
        effects: list[Any] = []
        while not self._exited:
            decision = self.scheduler.decide(self.lanes, self.workers)
            if decision is None:
                break
            effects += self._apply(decision, now_ms)
        if lanes_free := self.lanes.free_count:
            effects += self.workers.hurry(lanes_free, lambda job_id: self.desk.get(job_id).order)
        return effects

    def _apply(self, decision: Decision, now_ms: int) -> list[Any]:
        match decision:
            case ImportInto():
                return self.handoff.start_import(decision, now_ms)
            case PrefillLocally():
                return self.lane_work.start_local_prefill(decision, now_ms)
            case SendPrefill():
                return self.handoff.send_prefill(decision, now_ms)

    def _wait_deadline_ms(self, job: Job) -> int:
        return max(job.since_ms, self.workers.unusable_since_ms) + self.settings.prefill_wait_ms

    def _on_time_passed(self, event: ev.TimePassed, now_ms: int) -> list[Any]:
        if self.watch.hung(now_ms):
            detail = f"compute made no progress for {self.settings.stall_ms} ms"
            return self._leave(ExitStatus.HUNG, ErrorCode.ENGINE_HUNG, detail, now_ms)
        if self._drain_deadline_ms is not None and now_ms >= self._drain_deadline_ms:
            detail = f"not finished within --drain-ms {self.settings.drain_ms}"
            return self._leave(ExitStatus.DRAIN_INCOMPLETE, ErrorCode.DRAIN_TIMEOUT, detail, now_ms)
        effects = self.workers.expire(now_ms)
        for job_id, kind in self.desk.timers.take_due(now_ms):
            effects += self._on_job_deadline(job_id, kind, now_ms)
        while (head := self.scheduler.head()) is not None and self.scheduler.must_wait(head, self.workers):
            if now_ms < self._wait_deadline_ms(head):
                break
            refusals = "; ".join(worker.refusal for worker in self.workers if worker.refusal)
            reason = f" ({refusals})" if refusals else ""
            detail = f"no prefill node was usable for {self.settings.prefill_wait_ms} ms{reason}"
            effects += self.desk.fail(head, ErrorCode.NO_PREFILL_NODE, detail, now_ms)
        return effects

    def _on_job_deadline(self, job_id: str, kind: str, now_ms: int) -> list[Any]:
        job = self.desk.get(job_id)
        if job is None:
            return []
        if kind == "prefill":
            return self.handoff.on_timeout(job, now_ms)
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
        return [*closing, ev.LeaveWorkers(reason), ev.ExitNode(status, reason)]
