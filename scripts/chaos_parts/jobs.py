"""The questions that jobs ask, their right answers, and what became of each job.

Decides which jobs a client draws, what counts as an answer, and what the right tokens are: those that one
process without a prefill node gave for the same question before the chaos began. A job may ask for fewer
tokens than the reference has; its answer is then the beginning of it.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from chaos_parts.scenario import Scenario
from chaos_parts.schedule import random_of
from common.clock import now_ms
from common.errors import ErrorCode, TandemError
from common.messages import Accepted, Failed, Finished, Rejected, Tokens
from transport.client import Client
from transport.launch.batch import Batch, BatchJob
from transport.launch.pair import Pair
from transport.launch.pair_plan import PairPlan

FINISHED = "FINISHED"


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, how to sample, and (once known) every token of its longest answer."""

    prompt_ids: list[int]
    sampling: dict[str, Any]
    reference: list[int] = field(default_factory=list)

    def answer(self, max_tokens: int) -> list[int]:
        """What a job with this limit must get."""
        return self.reference[:max_tokens]


@dataclass(slots=True)
class Job:
    """One job, as its client saw it.

    answers: code of each terminal message, in order of arrival; `FINISHED` is one. lost: the answer is the
    client's own, because its session had ended. incarnation: the decode node that it was sent to.
    """

    client: str
    label: str
    question: int
    max_tokens: int
    incarnation: str
    session: str
    cancelled: bool = False
    client_killed: bool = False
    client_silenced: bool = False
    accepted: int = 0
    token_ids: list[int] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    definite: bool = False
    lost: bool = False
    path: str = ""
    disorder: list[str] = field(default_factory=list)
    ended_ms: int = 0

    def take(self, kind: str, fields: dict[str, Any]) -> None:
        """A message about this job: its type's name and what counts of it."""
        if self.answers:
            self.disorder.append(f"{kind} after the end")
        if kind == "Accepted":
            self.accepted += 1
        elif kind == "Tokens":
            self.token_ids += fields["token_ids"]
        else:
            self.answers.append(fields["code"])
            self.definite, self.lost, self.path = fields["definite"], fields["lost"], fields["path"]
            self.ended_ms = now_ms()

    @property
    def outcome(self) -> str:
        """For the count by outcome."""
        if not self.answers:
            return "client killed" if self.client_killed else "UNANSWERED"
        return f"{self.answers[0]} (client lost its node)" if self.lost else self.answers[0]


def described(message: Any, lost: bool) -> tuple[str, dict[str, Any]]:
    """A message in the form that `Job.take` takes, which also fits a line of JSON."""
    kind = type(message).__name__
    match message:
        case Tokens(token_ids=token_ids):
            return kind, {"token_ids": list(token_ids)}
        case Finished(path=path):
            return kind, {"code": FINISHED, "definite": False, "lost": False, "path": path}
        case Failed(code=code, definite=definite):
            lost = lost and code is ErrorCode.PEER_LOST
            return kind, {"code": str(code), "definite": definite, "lost": lost, "path": ""}
        case Rejected(code=code):
            return kind, {"code": str(code), "definite": True, "lost": False, "path": ""}
        case Accepted():
            return kind, {}
    return kind, {"code": f"unexpected {kind}", "definite": False, "lost": False, "path": ""}


def draw_questions(seed: int, scenario: Scenario) -> list[Question]:
    """Prompts of all lengths, sampled in every way; the first two are the shortest and the longest."""
    random = random_of(seed, "questions")
    low, high = scenario.prompt_tokens
    questions = []
    for index in range(scenario.questions):
        length = (low, high)[index % 2] if index < 2 else random.randint(low, high)
        prompt_ids = [random.randint(*scenario.token_ids) for _ in range(length)]
        sampling = random.choice(
            (
                {"ignore_eos": True},
                {},
                {"ignore_eos": True, "temperature": 0.9, "seed": random.getrandbits(32)},
                {"temperature": 0.7, "top_p": 0.9, "seed": random.getrandbits(32)},
                {"stop_token_ids": [random.randint(*scenario.token_ids) for _ in range(3)]},
            )
        )
        questions.append(Question(prompt_ids, sampling))
    return questions


def draw_job(random: Random, scenario: Scenario) -> tuple[int, int, int | None]:
    """Question, limit of tokens and, for some, after how many milliseconds the client takes the job back."""
    max_tokens = random.choice((1, random.randint(*scenario.output_tokens), scenario.output_tokens[1]))
    cancel_ms = random.choice((0, 5, 30, 100, 300)) if random.random() < 0.2 else None
    return random.randrange(scenario.questions), max_tokens, cancel_ms


def answer_alone(questions: list[Question], scenario: Scenario, turn: Callable[[], None]) -> list[Question]:
    """The questions with their references, from one process that computes everything itself."""
    plan = PairPlan(kind=scenario.kind, decode_extra=scenario.node_flags, alone=True)
    limit = scenario.output_tokens[1]
    jobs = [
        BatchJob(str(index), prompt_ids=item.prompt_ids, sampling={**item.sampling, "max_tokens": limit})
        for index, item in enumerate(questions)
    ]
    pair = Pair(plan)
    keep_logs = False
    try:
        with pair:
            pair.wait_ready(turn)
            with Client(pair.decode_endpoint) as client:
                outcomes = Batch(client, jobs, concurrency=4, on_end=lambda outcome: turn()).run()
        for outcome in outcomes:
            if not isinstance(outcome.answer, Finished):
                raise TandemError(f"the reference failed before any chaos: {outcome.answer}")
    except TandemError:
        keep_logs = True
        raise
    finally:
        if not keep_logs:
            shutil.rmtree(pair.directory.path)
    return [
        Question(item.prompt_ids, item.sampling, outcome.token_ids)
        for item, outcome in zip(questions, outcomes, strict=True)
    ]
