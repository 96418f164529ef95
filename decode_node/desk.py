"""The job desk: every job from SUBMIT to its one terminal answer.

Decides who may submit, what a client is told and when a job is over; part of the decode core, called by it
alone. Every way out of a job leads through `_retire`, once: it answers the client, detaches the reservation,
stops the lane and tells both threads to forget. What is still written or read then stays taken in the books
of worker and lanes, with no job attached, until its own end is reported.
"""

from collections.abc import Callable
from typing import Any

from common import limits
from common.errors import ErrorCode, check
from common.lifecycle import JobEvent, JobState, LaneEvent, LaneState
from common.messages import (
    Accepted,
    CancelJob,
    Failed,
    Finished,
    HelloOk,
    HelloRefused,
    Rejected,
    Role,
    Submit,
    Tokenize,
    Tokenized,
    Tokens,
)
from decode_node import commands
from decode_node import events as ev
from decode_node.clients import Clients
from decode_node.jobs import Job
from decode_node.lanes import Lane, Lanes
from decode_node.prefix_cache import PrefixCache
from decode_node.scheduler import Scheduler
from decode_node.settings import DecodeSettings
from decode_node.timers import Timers
from decode_node.workers import Workers

BUSY_RETRY_MS = 500
_WAITING = (JobState.TOKENIZING, JobState.QUEUED)
Sampling = ev.FirstTokenSampled | ev.LocalPrefillEnded | ev.TokenSampled


class JobDesk:
    """All live jobs and the clients they belong to."""

    def __init__(
        self,
        settings: DecodeSettings,
        scheduler: Scheduler,
        workers: Workers,
        lanes: Lanes,
        cache: PrefixCache,
        new_session_id: Callable[[], str],
        new_job_id: Callable[[], str],
    ) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._workers = workers
        self._lanes = lanes
        self._cache = cache
        self._new_session_id = new_session_id
        self._new_job_id = new_job_id
        self._jobs: dict[str, Job] = {}
        self._arrivals = 0
        self.clients = Clients()
        self.timers = Timers()
        self.waiting_count = 0
        self.draining = False
        self._preparing_count = 0
        self._prepared_ms = 0
        self._tokenizing_count = 0
        self.counters = {
            "jobs_accepted": 0,
            "jobs_rejected": 0,
            "jobs_finished": 0,
            "jobs_failed": 0,
            "jobs_cancelled": 0,
        }

    def text_slow(self, now_ms: int) -> bool:
        """Whether the text thread has owed an answer for half the time after which compute counts as hung."""
        bound_ms = self._settings.stall_ms // 2
        if self._preparing_count and now_ms - self._prepared_ms >= bound_ms:
            return True
        return any(job.text_pending and now_ms - job.text_moved_ms >= bound_ms for job in self.live())

    def get(self, job_id: str) -> Job | None:
        """A live job; None when it has ended: whoever answers for it then is late."""
        return self._jobs.get(job_id)

    def live(self) -> list[Job]:
        return list(self._jobs.values())

    @property
    def token_limit(self) -> int:
        """Most positions of one job: the smaller of both sides', as far as the other is known."""
        own, theirs = self._settings.profile.max_tokens, self._workers.max_tokens
        return own if theirs is None else min(own, theirs)

    def on_client_hello(self, event: ev.ClientHello, now_ms: int) -> list[Any]:
        if event.hello.role is Role.DECODE:
            detail = "this is a decode node: let --pd-prefill-worker name a prefill node"
            return [ev.AnswerHello(event.route, HelloRefused(False, detail, ("role",)))]
        session = self._new_session_id()
        self.clients.open(session)
        own = self._settings
        answer = HelloOk(session, own.incarnation, own.lease_ms, own.stall_ms, own.profile)
        return [ev.AnswerHello(event.route, answer)]

    def on_client_lost(self, event: ev.ClientLost, now_ms: int) -> list[Any]:
        effects = []
        for job_id in self.clients.close(event.session):
            self.counters["jobs_cancelled"] += 1
            self.counters["jobs_failed"] += 1
            effects += self._retire(self._jobs[job_id], f"client gone: {event.cause}", now_ms)
            effects.append(ev.ReportEnd(job_id, None, event.cause))
        return effects

    def on_client_mistake(self, event: ev.ClientMistake, now_ms: int) -> list[Any]:
        return self.clients.mistake(event.session, event.code, event.detail)

    def on_message(self, session: str, message: Any, now_ms: int) -> list[Any]:
        """A message of a client: a job, a cancel, or nothing that a client should send."""
        if isinstance(message, Submit):
            return self._on_submit(session, message, now_ms)
        if isinstance(message, CancelJob):
            return self._on_cancel(session, message, now_ms)
        if isinstance(message, Tokenize):
            return self._on_tokenize(session, message)
        detail = f"a decode node takes no {type(message).__name__} from a client"
        return self.clients.mistake(session, ErrorCode.BAD_MESSAGE, detail)

    def _on_cancel(self, session: str, message: CancelJob, now_ms: int) -> list[Any]:
        # An unknown label is a job that has ended meanwhile.
        job_id = self.clients.job_id(session, message.label)
        if job_id is None:
            return []
        self.counters["jobs_cancelled"] += 1
        return self.fail(self._jobs[job_id], ErrorCode.CANCELLED, "cancelled by its client", now_ms)

    def _on_tokenize(self, session: str, request: Tokenize) -> list[Any]:
        """No job, and not waited for at the end: only the text thread is asked."""
        refusal = None
        if self.draining:
            refusal = ErrorCode.SHUTTING_DOWN, "this decode node is shutting down"
        elif self._tokenizing_count >= limits.TOKENIZE_REQUESTS:
            refusal = ErrorCode.BUSY, f"{limits.TOKENIZE_REQUESTS} texts are being tokenised already"
        if refusal is not None:
            return [self._rejection(session, request.label, *refusal)]
        self._tokenizing_count += 1
        return [commands.TokenizeText(session, request)]

    def on_tokenized(self, event: ev.TextTokenized, now_ms: int) -> list[Any]:
        self._tokenizing_count -= 1
        answer = Tokenized(event.label, event.token_ids, event.text)
        return [ev.SendToClient(event.session, answer)] if self.clients.has(event.session) else []

    def on_tokenize_refused(self, event: ev.TokenizeRefused, now_ms: int) -> list[Any]:
        self._tokenizing_count -= 1
        answer = self._rejection(event.session, event.label, event.code, event.detail)
        return [answer] if self.clients.has(event.session) else []

    def _on_submit(self, session: str, submit: Submit, now_ms: int) -> list[Any]:
        refusal = self.clients.refusal(session, submit.label)
        if self.draining:
            refusal = ErrorCode.SHUTTING_DOWN, "this decode node is shutting down"
        # A cancelled job is still in the text thread's queue until that has answered.
        waiting = max(self.waiting_count, self._preparing_count)
        if refusal is None and waiting >= self._settings.max_queue:
            refusal = ErrorCode.BUSY, f"{waiting} jobs are waiting already (--max-queue)"
        if refusal is not None:
            return [self._rejected(session, submit.label, *refusal)]
        self._arrivals += 1
        job = Job(self._new_job_id(), session, submit.label, self._arrivals, now_ms, now_ms)
        job.cache_salt = submit.cache_salt
        self._cache.name_root(job)
        self._jobs[job.job_id] = job
        self.clients.add(session, submit.label, job.job_id)
        self.waiting_count += 1
        if self._preparing_count == 0:
            self._prepared_ms = now_ms
        self._preparing_count += 1
        self.timers.set(now_ms + self._settings.job_timeout_ms, job.job_id, "job")
        return [commands.PrepareSubmission(job.job_id, submit, self.token_limit)]

    def on_prepared(self, event: ev.SubmissionPrepared, now_ms: int) -> list[Any]:
        self._preparing_count -= 1
        self._prepared_ms = now_ms
        job = self.get(event.job_id)
        if job is None:
            return []
        job.prompt, job.prompt_digest, job.sampling = event.prompt, event.prompt_digest, event.sampling
        job.shorter_digest = event.shorter_digest
        job.advance(JobEvent.ACCEPTED, now_ms)
        self._scheduler.enqueue(job)
        self.counters["jobs_accepted"] += 1
        return [ev.SendToClient(job.client, Accepted(job.label, job.job_id, job.prompt_tokens))]

    def on_refused(self, event: ev.SubmissionRefused, now_ms: int) -> list[Any]:
        self._preparing_count -= 1
        self._prepared_ms = now_ms
        job = self.get(event.job_id)
        if job is None:
            return []
        effects = self._retire(job, "rejected", now_ms)
        return [*effects, self._rejected(job.client, job.label, event.code, event.detail)]

    def on_text(self, event: ev.TextProduced, now_ms: int) -> list[Any]:
        job = self.get(event.job_id)
        if job is None or event.choice != job.choice:
            return []
        job.text_pending -= 1
        job.text_moved_ms = now_ms
        job.completion_tokens += len(event.token_ids)
        effects: list[Any] = []
        if event.token_ids or event.text:
            if job.first_token_ms is None:
                job.first_token_ms = now_ms - job.arrival_ms
            effects.append(ev.SendToClient(job.client, self._tokens(job, event)))
        if event.stopped or event.final:
            reason = "stop" if event.stopped else job.finish_reason
            ended = self._next_choice(job, reason) if job.choices_left else self._finish(job, reason, now_ms)
            effects += ended
        return effects

    def _next_choice(self, job: Job, reason: str) -> list[Any]:
        """One of the job's answers has ended: the next one is made from the same KV, in the same lane."""
        kept = self._kept(job)
        job.reasons.append(reason)
        job.choice += 1
        job.generated.clear()
        job.text_pending = 0
        return [*kept, self.start_choice(job)]

    def start_choice(self, job: Job) -> commands.StartChoice:
        """Have the answer made that is next, in the lane that has the prompt's KV."""
        return commands.StartChoice(job.job_id, job.lane, job.choice, job.prompt, job.sampling)

    def _tokens(self, job: Job, event: ev.TextProduced) -> Tokens:
        return Tokens(job.label, event.token_ids, event.text, event.choice, event.logprobs)

    def on_text_failed(self, event: ev.TextFailed, now_ms: int) -> list[Any]:
        job = self.get(event.job_id)
        return [] if job is None else self.fail(job, ErrorCode.ENGINE_ERROR, event.detail, now_ms)

    def push(self, job: Job, event: Sampling, now_ms: int) -> commands.PushTokens:
        """Hand a sampled token to the text thread; the client gets what it makes of it."""
        if job.text_pending == 0:
            job.text_moved_ms = now_ms
        job.text_pending += 1
        job.finish_reason = event.finish_reason
        final = event.finish_reason is not None
        return commands.PushTokens(job.job_id, event.token_id, final, event.logprobs, job.choice)

    def leave_queue(self, job: Job, event: JobEvent, now_ms: int) -> None:
        """A queued job is being worked on."""
        job.advance(event, now_ms)
        self.waiting_count -= 1

    def requeue(self, job: Job, now_ms: int) -> None:
        """A job without reservation or lane goes back to its old place."""
        check(job.reservation is None and job.lane is None, "INV-2: a queued job holds something")
        job.record = None
        job.advance(JobEvent.REQUEUED, now_ms)
        self.waiting_count += 1
        self._scheduler.enqueue(job)

    def fail(self, job: Job, code: ErrorCode, detail: str, now_ms: int) -> list[Any]:
        """End a job with FAILED; one that has yielded a token is not told that it never happened (INV-8)."""
        if code.definite and job.keep_token:
            code = ErrorCode.PEER_LOST
        self.counters["jobs_failed"] += 1
        effects = self._retire(job, f"{code}: {detail}", now_ms)
        failed = Failed(job.label, code, detail[: limits.DETAIL_CHARACTERS], code.definite)
        return [*effects, ev.SendToClient(job.client, failed), ev.ReportEnd(job.job_id, failed, "failed")]

    def fail_all(self, code: ErrorCode, detail: str, now_ms: int) -> list[Any]:
        """End every job."""
        return [effect for job in self.live() for effect in self.fail(job, code, detail, now_ms)]

    def detach(self, job: Job, cause: str, now_ms: int) -> list[Any]:
        """The job lets go of its reservation, if it has one."""
        reservation, job.reservation = job.reservation, None
        self.timers.cancel(job.job_id, "prefill")
        return [] if reservation is None else self._workers.detach(reservation, cause, now_ms)

    def _finish(self, job: Job, reason: str, now_ms: int) -> list[Any]:
        self.counters["jobs_finished"] += 1
        kept = self._kept(job)
        effects = kept + self._retire(job, "finished", now_ms)
        reasons = (*job.reasons, reason) if job.many else ()
        finished = Finished(job.label, (*reasons, reason)[0], job.path, job.usage(), job.timings(), reasons)
        report = ev.ReportEnd(job.job_id, finished, "finished")
        return [*effects, ev.SendToClient(job.client, finished), report]

    def _kept(self, job: Job) -> list[Any]:
        """KV of a job that a stop string has ended is still in its lane."""
        decoding = job.lane is not None and self._lanes[job.lane].state is LaneState.DECODING
        return self._cache.keep(job, self._lanes[job.lane]) if decoding else []

    def _retire(self, job: Job, cause: str, now_ms: int) -> list[Any]:
        """The one way out: release everything the job holds, and forget it. The caller answers the client.

        A second call for the same job is illegal by the table of `JobState`, so no job is answered twice.
        """
        if job.state in _WAITING:
            self.waiting_count -= 1
        job.advance(JobEvent.RETIRED, now_ms)
        del self._jobs[job.job_id]
        self.timers.cancel(job.job_id, "job")
        self._cache.let_go(job)
        self.clients.remove(job.client, job.label)
        effects = self.detach(job, cause, now_ms) + self._leave_lane(job)
        return [*effects, commands.ForgetJob(job.job_id, job.known_to_compute)]

    def stop_lane(self, lane: Lane) -> list[Any]:
        """Have compute let go of a lane whose job has ended."""
        self._lanes.advance(lane, LaneEvent.STOP_REQUESTED)
        return [commands.StopLane(lane.index)]

    def _leave_lane(self, job: Job) -> list[Any]:
        """A copy runs to its end by itself; whatever else goes on in the job's lane is stopped."""
        if job.lane is None or self._lanes[job.lane].state is LaneState.IMPORTING:
            return []
        return self.stop_lane(self._lanes[job.lane])

    def _rejected(self, session: str, label: str, code: ErrorCode, detail: str) -> ev.SendToClient:
        self.counters["jobs_rejected"] += 1
        return self._rejection(session, label, code, detail)

    def _rejection(self, session: str, label: str, code: ErrorCode, detail: str) -> ev.SendToClient:
        retry_ms = BUSY_RETRY_MS if code is ErrorCode.BUSY else None
        cut = detail[: limits.DETAIL_CHARACTERS]
        return ev.SendToClient(session, Rejected(label, code, cut, retry_ms))
