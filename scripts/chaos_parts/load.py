"""The load: clients that send jobs all the time, each on a thread of its own.

Decides when a client sends, cancels, and stops; keeps every job that it sent. A client goes on through every
disturbance: when its node is gone it asks again until somebody answers. It must never forget a job, and never
come back to its node later than the node's lease, or what it finds would be its own fault.
"""

import threading
from random import Random

from chaos_parts.jobs import FINISHED, Job, Question, described, draw_job
from chaos_parts.scenario import Scenario
from chaos_parts.schedule import random_of
from common.clock import now_ms, pause_ms
from common.errors import NodeUnavailable
from transport.client import Client

JOBS_AT_ONCE = 2
LAST_JOBS = 3
_TURN_MS = 15
_AGAIN_MS = 50
_CONNECT_MS = 1_000


class LoadClient(threading.Thread):
    """One client. Phases: random jobs; then, once told that all is healed, some that must finish; then over.

    late_ms: the longest time that it stayed away from its node.
    """

    def __init__(
        self, name: str, endpoint: str, questions: list[Question], scenario: Scenario, seed: int
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.jobs: list[Job] = []
        self.last_jobs: list[Job] = []
        self.late_ms = 0
        self.fault = ""
        self._endpoint = endpoint
        self._questions = questions
        self._scenario = scenario
        self._random: Random = random_of(seed, name)
        self._open: dict[str, Job] = {}
        self._cancel_at: dict[str, int] = {}
        self._not_before_ms = 0
        self._seen_ms = now_ms()
        self._calm = threading.Event()
        self._healed = threading.Event()
        self._leave = threading.Event()

    def calm(self) -> None:
        """Send no more random jobs; those that run end as they like."""
        self._calm.set()

    def healed(self) -> None:
        """Send the last jobs, which must finish."""
        self._healed.set()

    def leave(self) -> None:
        """Whatever runs: leave."""
        self._leave.set()

    @property
    def open_count(self) -> int:
        return len(self._open)

    def run(self) -> None:
        """The thread's work; `fault` is set when it dies."""
        try:
            client = self._connect()
            if client is not None:
                with client:
                    while not self._leave.is_set() and not self._finished():
                        self._turn(client)
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"
            raise

    def _finished(self) -> bool:
        ended = sum(bool(job.answers) for job in self.last_jobs)
        return self._healed.is_set() and not self._open and ended >= LAST_JOBS

    def _connect(self) -> Client | None:
        while not self._leave.is_set():
            try:
                return Client(self._endpoint, _CONNECT_MS, self._scenario.client_times)
            except NodeUnavailable:
                pause_ms(_AGAIN_MS)
        return None

    def _turn(self, client: Client) -> None:
        self._send(client)
        for label, at_ms in list(self._cancel_at.items()):
            if now_ms() >= at_ms:
                del self._cancel_at[label]
                self._open[label].cancelled = True
                client.cancel(label)
        for message in client.events(_TURN_MS):
            job = self._open.get(getattr(message, "label", ""))
            if job is None:
                self._blame(message)
                continue
            lost = client.hello is None or client.hello.session != job.session
            job.take(*described(message, lost))
            if job.answers:
                self._close(job)
        self.late_ms = max(self.late_ms, now_ms() - self._seen_ms)
        self._seen_ms = now_ms()

    def _close(self, job: Job) -> None:
        del self._open[job.label]
        self._cancel_at.pop(job.label, None)
        if job.answers[0] != FINISHED:
            # A node that refuses, drains or is gone is not to be hammered.
            self._not_before_ms = now_ms() + self._random.randint(20, 400)

    def _blame(self, message: object) -> None:
        """An answer for a job that is over, or for none at all."""
        known = [job for job in self.jobs if job.label == getattr(message, "label", None)]
        if known:
            known[-1].take(*described(message, lost=False))
        else:
            self.fault = f"a message for no job: {message}"

    def _send(self, client: Client) -> None:
        last = self._healed.is_set() and len(self.last_jobs) < LAST_JOBS
        wanted = last or not self._calm.is_set()
        if not wanted or client.hello is None or now_ms() < self._not_before_ms:
            return
        # The last ones singly: none of them may meet a full queue.
        at_once = 1 if last else JOBS_AT_ONCE
        while len(self._open) < at_once:
            question, max_tokens, cancel_ms = draw_job(self._random, self._scenario)
            if client.hello is None:
                return
            label = f"{self.name}-{len(self.jobs)}"
            hello = client.hello
            job = Job(self.name, label, question, max_tokens, hello.incarnation, hello.session)
            self._open[label] = job
            self.jobs.append(job)
            if last:
                self.last_jobs.append(job)
            elif cancel_ms is not None:
                self._cancel_at[label] = now_ms() + cancel_ms
            asked = self._questions[question]
            client.submit(
                label,
                prompt_ids=asked.prompt_ids,
                sampling={**asked.sampling, "max_tokens": max_tokens},
            )
