"""Several answers of one job on the client's side: each piece finds its choice."""

from collections.abc import Iterator
from typing import Any

from common.client_messages import Finished, Timings, TokenLogprob, Tokens, TopLogprob, Usage
from transport.launch.batch import Batch, BatchJob, Choice, Outcome

TIMINGS = Timings(3, 1, {"queued": 3}, 0, 0, 0, 0, 0, None)
FIRST = TokenLogprob(5, "a", -0.5, (TopLogprob(5, "a", -0.5), TopLogprob(6, "b", -1.5)))
SECOND = TokenLogprob(6, "b", -1.5)


def finished(*reasons: str) -> Finished:
    return Finished("0", "stop", "remote", Usage(2, 3), TIMINGS, reasons)


class Node:
    """A client whose node answers what it was made with."""

    def __init__(self, *messages: Any) -> None:
        self._messages = messages

    def submit(self, label: str, **job: Any) -> None:
        assert (label, job["sampling"]) == ("0", {"n": 2})

    def events(self, timeout_ms: int) -> Iterator[Any]:
        yield from self._messages


def outcome_of(*messages: Any) -> Outcome:
    job = BatchJob("mine", prompt="x", sampling={"n": 2})
    (outcome,) = Batch(Node(*messages), [job], concurrency=1).run()
    return outcome


def test_pieces_of_several_answers_are_kept_apart() -> None:
    outcome = outcome_of(
        Tokens("0", (5,), "a", 0, (FIRST,)),
        Tokens("0", (6,), "b", 1, (SECOND,)),
        Tokens("0", (6,), "b", 0, (SECOND,)),
        finished("length", "stop"),
    )
    assert outcome.choices == {0: Choice("ab", [5, 6], [FIRST, SECOND]), 1: Choice("b", [6], [SECOND])}
    assert (outcome.text, outcome.token_ids) == ("ab", [5, 6])
