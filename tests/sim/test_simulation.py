"""The simulator in CI: 20,000 seeded runs, and the seeds that once found something.

A failure prints the command that replays it.
"""

from pathlib import Path
from typing import Any

import pytest

from common.data_planes import SHM, TCP
from common.errors import ErrorCode
from tests.sim.campaign import Summary, campaign
from tests.sim.coverage import IMPOSSIBLE, all_cells, all_pairs, possible_cells
from tests.sim.runs import EVENTS, JOBS_MIN, Run
from transport.bulk import BulkSender

RUNS = 20_000
PROCESSES = 2
HITS_MIN = 20
WAYS = (
    "FINISHED",
    *(ErrorCode.BUSY, ErrorCode.EMPTY_PROMPT, ErrorCode.SHUTTING_DOWN, ErrorCode.NO_PREFILL_NODE),
    *(ErrorCode.CANCELLED, ErrorCode.PREFILL_ERROR, ErrorCode.PREFILL_TIMEOUT, ErrorCode.PEER_LOST),
    *(ErrorCode.JOB_TIMEOUT, ErrorCode.KV_CORRUPT, ErrorCode.KV_STALE, ErrorCode.ENGINE_ERROR),
    *(ErrorCode.ENGINE_HUNG, ErrorCode.DRAIN_TIMEOUT),
)
REGRESSIONS = Path(__file__).with_name("regressions.txt")


def regressions() -> list[tuple[int, str]]:
    """Seeds that found something, and what."""
    lines = REGRESSIONS.read_text(encoding="utf-8").splitlines()
    found = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    return [(int(seed), what) for seed, what in found]


def test_seeds_that_once_found_something_run_well_now() -> None:
    for seed, what in regressions():
        assert Run(seed).complete().jobs >= JOBS_MIN, what


def test_the_same_seed_makes_the_same_run() -> None:
    runs = [Run(7), Run(7)]
    for run in runs:
        run.complete()
    assert runs[0].taken == runs[1].taken
    assert len(runs[0].taken) >= EVENTS


def test_a_copied_world_goes_its_own_way_and_the_same_way() -> None:
    run = Run(11)
    for _ in range(100):
        run._take(run._draw())
    copy = run.world.clone()
    before = run.world.steps
    options = copy.usual_options()
    copy.take(options[0])
    assert (run.world.steps, copy.steps) == (before, before + 1)
    assert run.world.usual_options() == options
    run.world.take(options[0])
    assert run.world.usual_options() == copy.usual_options()


def test_runs_over_tcp_wait_for_credit_and_meet_late_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, send = [], BulkSender._send

    def counting_send(sender: BulkSender, now_ms: int) -> list[Any]:
        effects = send(sender, now_ms)
        if sender._waiting and sender._route is not None:
            waits.append(sender.session)
        return effects

    monkeypatch.setattr(BulkSender, "_send", counting_send)
    runs = [Run(seed) for seed in range(60)]
    planes = {run.plan.planes for run in runs}
    fenced = 0
    for run in runs:
        if TCP in run.plan.planes:
            run.complete()
            receivers = [end for node in run.world.decodes for end in node.stack.receivers.values()]
            fenced += sum(receiver.fenced_pieces for receiver in receivers)
    assert planes == {(SHM,), (TCP,), (TCP, SHM)}
    assert len(waits) > 20
    assert fenced > 0


@pytest.fixture(scope="module")
def summary() -> Summary:
    return campaign(0, RUNS, PROCESSES)


def test_no_run_breaks_an_invariant(summary: Summary) -> None:
    assert [failure for _, failure in summary.failures] == []
    assert summary.runs == RUNS


def test_every_run_has_its_jobs_and_events(summary: Summary) -> None:
    assert summary.jobs_min >= JOBS_MIN
    assert summary.events_min >= EVENTS


def test_every_legal_transition_was_made_often_enough(summary: Summary) -> None:
    hits = {name: summary.coverage.pairs[name] for name in all_pairs()}
    assert {name: count for name, count in hits.items() if count < HITS_MIN} == {}


def test_every_fault_met_every_state_often_enough(summary: Summary) -> None:
    hits = {name: summary.coverage.cells[name] for name in possible_cells()}
    assert {name: count for name, count in hits.items() if count < HITS_MIN} == {}


def test_jobs_ended_in_every_way_they_can(summary: Summary) -> None:
    assert {way: summary.answers[way] for way in WAYS if summary.answers[way] == 0} == {}


def test_what_counts_as_impossible_did_not_happen(summary: Summary) -> None:
    possible = set(possible_cells())
    assert [name for name in all_cells() if name not in possible and summary.coverage.cells[name]] == []
    assert all(reason for reason in IMPOSSIBLE.values())
