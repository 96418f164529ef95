"""Run many jobs over one client, and collect what came back.

Decides how many are under way at once and what happens when the node is busy. Used by the scripts; the
caller's thread owns the client. It must never lose a job: each one that was sent has an outcome, also when
the node dies or the caller wants to stop.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.client_messages import TokenLogprob
from common.clock import now_ms
from common.errors import ErrorCode
from common.messages import Accepted, Failed, Finished, Rejected, Tokens
from transport.client import Client

_TURN_MS = 100
_CANCEL_MS = 3_000


@dataclass(frozen=True, slots=True)
class BatchJob:
    """One job. Exactly one of prompt, messages and prompt_ids; sampling: fields of `SamplingParams`."""

    label: str
    prompt: str | None = None
    messages: list[dict[str, str]] | None = None
    prompt_ids: list[int] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Choice:
    """One of a job's answers. logprobs: one for each id, if the job asked for them."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, tokens: Tokens) -> None:
        """Take the next piece."""
        self.text += tokens.text
        self.token_ids.extend(tokens.token_ids)
        self.logprobs.extend(tokens.logprobs)


@dataclass(slots=True)
class Outcome:
    """What came of a job. end_ms: its answer's arrival, in ms since the batch began.

    choices: the job's answers by their number. answer: Finished, Failed or Rejected; None while it runs, and
    for good if the caller stopped before it was sent.
    """

    job: BatchJob
    choices: dict[int, Choice] = field(default_factory=lambda: {0: Choice()})
    answer: Finished | Failed | Rejected | None = None
    end_ms: int = 0

    @property
    def text(self) -> str:
        """Text of the first choice, of most jobs the only one."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        """Ids of the first choice."""
        return self.choices[0].token_ids


class Batch:
    """A batch under way. on_text is called with each piece, on_end with each outcome, in order of arrival."""

    def __init__(
        self,
        client: Client,
        jobs: Sequence[BatchJob],
        *,
        concurrency: int,
        on_text: Callable[[str], None] = lambda text: None,
        on_end: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        """concurrency: most jobs at the node at once."""
        self.outcomes = [Outcome(job) for job in jobs]
        self._client = client
        self._concurrency = concurrency
        self._on_text = on_text
        self._on_end = on_end
        self._waiting = deque(range(len(jobs)))
        self._running: set[int] = set()
        self._not_before_ms = 0
        self._start_ms = now_ms()

    def run(self, stopped: Callable[[], bool] = lambda: False) -> list[Outcome]:
        """All outcomes, in the order of the jobs. Once `stopped()`, what runs is cancelled and waited for.

        Raises NodeUnavailable when the node is gone and does not come back.
        """
        while (self._waiting or self._running) and not stopped():
            self._submit()
            self._receive(_TURN_MS)
        self._cancel()
        return self.outcomes

    def _cancel(self) -> None:
        for index in self._running:
            self._client.cancel(str(index))
        deadline_ms = now_ms() + _CANCEL_MS
        while self._running and now_ms() < deadline_ms:
            self._receive(_TURN_MS)

    def _submit(self) -> None:
        if now_ms() < self._not_before_ms:
            return
        while self._waiting and len(self._running) < self._concurrency:
            index = self._waiting.popleft()
            job = self.outcomes[index].job
            self._running.add(index)
            # Labels of live jobs must differ; the caller's own may repeat.
            self._client.submit(
                str(index),
                prompt=job.prompt,
                messages=job.messages,
                prompt_ids=job.prompt_ids,
                sampling=job.sampling,
            )

    def _receive(self, timeout_ms: int) -> None:
        for message in self._client.events(timeout_ms):
            if isinstance(message, Accepted) or not hasattr(message, "label"):
                continue
            index = int(message.label)
            outcome = self.outcomes[index]
            if isinstance(message, Tokens):
                outcome.choices.setdefault(message.choice, Choice()).add(message)
                self._on_text(message.text)
                continue
            self._running.discard(index)
            if isinstance(message, Rejected) and message.code is ErrorCode.BUSY:
                self._waiting.appendleft(index)
                self._not_before_ms = now_ms() + (message.retry_ms or _TURN_MS)
            else:
                outcome.answer, outcome.end_ms = message, now_ms() - self._start_ms
                self._on_end(outcome)
