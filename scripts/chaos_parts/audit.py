"""The audit: whether what was seen of a run is what must be seen of every run.

Decides right and wrong, and nothing else: pure functions from the evidence to one line for each thing that
must hold. A line that does not hold names the first few offenders. What is allowed is written down here and
nowhere else: which error codes a disturbance may cause, how a life may end, when a client may lose its node.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from chaos_parts.jobs import FINISHED, Job, Question
from chaos_parts.nodes import Life
from chaos_parts.scenario import Scenario
from chaos_parts.watch import Seen

SHOWN = 5
# What a job may end with when nodes die, stop, drain and lose messages. Everything else is a fault.
ALLOWED_CODES = frozenset(
    {
        FINISHED,
        "BUSY",
        "CANCELLED",
        "DRAINING",
        "DRAIN_TIMEOUT",
        "JOB_TIMEOUT",
        "KV_CORRUPT",
        "KV_STALE",
        "NO_PREFILL_NODE",
        "PEER_LOST",
        "PREFILL_ERROR",
        "PREFILL_TIMEOUT",
        "SHUTTING_DOWN",
    }
)
REJECTIONS = frozenset({"BUSY", "SHUTTING_DOWN"})
# A client may see an end that nobody asked for a little before the run does.
LATE_NOTE_MS = 1_000
# The watch comes round more often, unless nodes are slow to answer.
UNSEEN_MS = 2_000
ENDINGS = {"running": (None,), "killed": (-9,), "drained": (0, 1)}


@dataclass(slots=True)
class Evidence:
    """All that was seen. bad_lines: of the daemons' logs. late_ms: by client, its longest absence.

    quiet_ms: from the heal to both nodes holding nothing, None if they never did. remains: processes, files
    and shared memory that are still there. faults: of the machinery itself.
    """

    scenario: Scenario
    questions: list[Question]
    jobs: list[Job]
    last_jobs: list[Job]
    lives: list[Life]
    seen: dict[str, Seen]
    orphan_bound_ms: int
    quiet_ms: int | None
    quiet_bound_ms: int
    bad_lines: list[str] = field(default_factory=list)
    remains: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    late_ms: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that must hold. detail: figures when it does, offenders when it does not.

    holds: None when the run was too short to say.
    """

    name: str
    holds: bool | None
    detail: str


def audit(evidence: Evidence) -> list[Line]:
    """Every line, in the order in which a person would ask."""
    jobs = evidence.jobs
    tokens = sum(len(job.token_ids) for job in jobs)
    answers = sum(seen.answers for seen in evidence.seen.values())
    oldest_ms = max((seen.oldest_ms for seen in evidence.seen.values()), default=0)
    bound_ms = evidence.orphan_bound_ms
    finished = sum(job.answers[:1] == [FINISHED] for job in jobs)
    return [
        _line("every job answered exactly once", not_answered_once(jobs), f"{len(jobs)} jobs"),
        _line("tokens right, or their beginning", wrong_tokens(evidence), f"{tokens} tokens"),
        _line("errors honest and of a known kind", dishonest(jobs), f"{len(jobs) - finished} not finished"),
        _line("clients lost only nodes that ended", lost_for_nothing(evidence), "every loss explained"),
        _line("last jobs finished after the heal", unfinished(evidence), f"{len(evidence.last_jobs)} jobs"),
        _line("both nodes hold nothing in the end", not_quiet(evidence), f"after {evidence.quiet_ms} ms"),
        _line(
            "no orphan older than its bound",
            contradictions(evidence),
            f"oldest {oldest_ms} ms of {bound_ms} ms, {answers} STATUS answers",
            measured=answers > 0,
        ),
        _line("no node ended unasked or late", bad_endings(evidence.lives), f"{len(evidence.lives)} lives"),
        _line("memory flat", grown(evidence), growth_figures(evidence), measured=was_weighed(evidence)),
        _line("logs clean", evidence.bad_lines, "no violation, no traceback, no error"),
        _line("nothing left behind", evidence.remains, "no process, socket or shared memory"),
        _line("the run itself worked", evidence.faults, "every thread and client ended well"),
    ]


def _line(name: str, offenders: Iterable[str], figures: str, *, measured: bool = True) -> Line:
    found = list(offenders)
    if not found:
        return Line(name, True if measured else None, figures)
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return Line(name, False, "; ".join(found[:SHOWN]) + more)


def long_lives(evidence: Evidence) -> list[Life]:
    """Lives that were long enough for the watch to see how they answer and what they weigh.

    It leaves before the last lives are drained.
    """
    scenario = evidence.scenario
    long_ms = 2 * scenario.warm_up_ms + scenario.drain_ms + UNSEEN_MS
    return [
        life
        for life in evidence.lives
        if None not in (life.ready_ms, life.leaving_ms) and life.leaving_ms - life.ready_ms >= long_ms
    ]


def contradictions(evidence: Evidence) -> Iterator[str]:
    """What was wrong with STATUS answers; and nodes that were there for long without one being seen."""
    for seen in evidence.seen.values():
        yield from seen.contradictions
    for node in sorted({life.node for life in long_lives(evidence)}):
        if node not in evidence.seen or not evidence.seen[node].answers:
            yield f"{node}: no STATUS answer was seen"


def not_answered_once(jobs: Iterable[Job]) -> Iterator[str]:
    """Jobs with no answer, or several, or anything after it. A killed client may have missed its answer."""
    for job in jobs:
        enough = 0 if job.client_killed else 1
        if not enough <= len(job.answers) <= 1 or job.disorder or job.accepted > 1:
            yield f"{job.label}: answers {job.answers}, accepted {job.accepted} times, {job.disorder}"


def wrong_tokens(evidence: Evidence) -> Iterator[str]:
    """Jobs whose tokens are not those of the reference: all of them when finished, else their beginning."""
    for job in evidence.jobs:
        right = evidence.questions[job.question].answer(job.max_tokens)
        whole = job.answers[:1] == [FINISHED]
        if job.token_ids != (right if whole else right[: len(job.token_ids)]):
            yield f"{job.label} ({job.outcome}): {job.token_ids} instead of {right}"


def dishonest(jobs: Iterable[Job]) -> Iterator[str]:
    """Jobs with an error that nothing here explains, or with tokens although it says there are none."""
    for job in jobs:
        code = job.answers[0] if job.answers else FINISHED
        if code not in ALLOWED_CODES:
            yield f"{job.label}: {code}"
        if job.definite and job.token_ids:
            yield f"{job.label}: {code} is definite, but there were {len(job.token_ids)} tokens"
        if code == "CANCELLED" and not job.cancelled:
            yield f"{job.label}: CANCELLED, but nobody asked for it"
        if job.answers and not job.accepted and not job.lost and code not in REJECTIONS | {"CANCELLED"}:
            yield f"{job.label}: {code} without ACCEPTED"


def lost_for_nothing(evidence: Evidence) -> Iterator[str]:
    """Jobs whose client lost its session although its node lived on and the client was there all the time."""
    leaving_ms = {life.identity: life.leaving_ms for life in evidence.lives if life.ended_ms is not None}
    for job in evidence.jobs:
        left_ms = leaving_ms.get(job.incarnation)
        away = job.client_silenced or evidence.late_ms.get(job.client, 0) > evidence.scenario.times.lease_ms
        if job.lost and not away and (left_ms is None or left_ms > job.ended_ms + LATE_NOTE_MS):
            yield f"{job.label}: its session ended, its node {job.incarnation[:8]} did not"


def unfinished(evidence: Evidence) -> Iterator[str]:
    """Jobs sent when all was well again, and yet not finished over the prefill node."""
    for job in evidence.last_jobs:
        if job.answers != [FINISHED] or job.path != "remote":
            yield f"{job.label}: {job.outcome} {job.path}"
    if not evidence.last_jobs:
        yield "none was sent"


def not_quiet(evidence: Evidence) -> Iterator[str]:
    if evidence.quiet_ms is None:
        yield f"something was still held {evidence.quiet_bound_ms} ms after the heal"


def bad_endings(lives: Iterable[Life]) -> Iterator[str]:
    """Lives that ended by themselves, with a wrong status, or not in time; the last ones must end with 0."""
    lives = list(lives)
    last = {life.node: life.number for life in lives}
    for life in lives:
        allowed = (0,) if life.number == last[life.node] else ENDINGS.get(life.how, ())
        if life.status not in allowed or life.problem:
            yield f"{life.node} node {life.number} {life.how}, status {life.status} {life.problem}".rstrip()


def growth_mib(life: Life, warm_up_ms: int) -> tuple[float, int] | None:
    """Growth since the warm-up and over how many ms; None for a life that was too short to say."""
    warm = [(at_ms, mib) for at_ms, mib in life.resident if at_ms >= warm_up_ms]
    if not warm or warm[-1][0] < 2 * warm_up_ms:
        return None
    return warm[-1][1] - warm[0][1], warm[-1][0] - warm[0][0]


def grown(evidence: Evidence) -> Iterator[str]:
    """Daemons that use more memory than they may, or that nobody weighed although there was time."""
    long = [(life.node, life.number) for life in long_lives(evidence)]
    for life in evidence.lives:
        growth = growth_mib(life, evidence.scenario.warm_up_ms)
        if growth is None and (life.node, life.number) in long:
            yield f"{life.node} node {life.number}: not measured in {life.leaving_ms - life.ready_ms} ms"
        if growth is not None and growth[0] > evidence.scenario.growth_mib:
            yield f"{life.node} node {life.number}: {growth[0]:+.1f} MiB in {growth[1] / 1_000:.0f} s"


def was_weighed(evidence: Evidence) -> bool:
    return any(growth_mib(life, evidence.scenario.warm_up_ms) is not None for life in evidence.lives)


def growth_figures(evidence: Evidence) -> str:
    """The last life of each node, which is the longest."""
    parts = []
    for node in sorted({life.node for life in evidence.lives}):
        life = [life for life in evidence.lives if life.node == node][-1]
        growth = growth_mib(life, evidence.scenario.warm_up_ms)
        if growth is not None:
            parts.append(f"{node} {growth[0]:+.1f} MiB in {growth[1] / 1_000:.0f} s")
    return f"{', '.join(parts) or 'too short to say'}; at most {evidence.scenario.growth_mib} MiB"
