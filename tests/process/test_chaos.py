"""The chaos script: a short run of it, and proof that its audit can fail.

A run of some seconds goes through every phase with real daemons. The audit is fed with the evidence of a good
run with one thing spoilt at a time, because a run of the product gives it nothing to find.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

from common.clock import now_ms, pause_ms

ROOT = Path(__file__).parents[2]
DEADLINE_MS = 90_000
NODE = "aa" * 8


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of the script; it is no package of this project."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    names = ("audit", "jobs", "nodes", "scenario", "schedule", "watch", "wire")
    return SimpleNamespace(**{name: import_module(f"chaos_parts.{name}") for name in names})


@pytest.fixture
def runtime() -> Iterator[Path]:
    # Not pytest's own directory: its path would not fit a socket.
    with TemporaryDirectory(prefix="tandem-test-") as directory:
        yield Path(directory)


def start(runtime: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "chaos.py"), *arguments],
        env=os.environ | {"XDG_RUNTIME_DIR": str(runtime), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left_in(runtime: Path) -> list[str]:
    """What is in the runtime directory, beside the lock that all launchers share."""
    return [str(path) for path in (runtime / "tandem").iterdir() if path.name != "lock"]


def test_a_short_run_disturbs_everything_and_breaks_nothing(runtime: Path) -> None:
    process = start(runtime, "--seconds", "12", "--seed", "7", "--json")
    output, errors = process.communicate(timeout=DEADLINE_MS / 1_000)
    assert process.returncode == 0, f"{output}\n{errors}"
    result = json.loads(output)
    assert result["ok"]
    assert not [line for line in result["audit"] if line["holds"] is False]
    rows = {name.split(":")[0] for name in result["disturbances"]}
    # Whether a mangled message is among it depends on how much the nodes had to say to each other.
    assert rows >= {"client", "decode", "prefill", "stranger"}
    assert result["jobs"]["FINISHED"] >= 12
    assert left_in(runtime) == []


def test_ctrl_c_leaves_nothing_behind(runtime: Path) -> None:
    process = start(runtime, "--seconds", "60")
    deadline_ms = now_ms() + DEADLINE_MS
    while not list(runtime.glob("tandem/*/decode-1/decode_node.out")):
        assert now_ms() < deadline_ms
        assert process.poll() is None, process.communicate()
        pause_ms(20)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(pids := children.read_text().split()) < 2:
        assert now_ms() < deadline_ms
        pause_ms(20)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=DEADLINE_MS / 1_000)
    assert process.returncode == 6, errors
    assert "interrupted" in errors
    assert not output
    assert "Traceback" not in errors
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert left_in(runtime) == []


def good_evidence(parts: SimpleNamespace, directory: Path) -> Any:
    """What is seen of a run in which one job finished, one failed, and each node lived twice."""
    question = parts.jobs.Question([97, 98], {}, [1, 2, 3, 4])
    finished = parts.jobs.Job("load-0", "load-0-0", 0, 3, NODE, "s", accepted=1, token_ids=[1, 2, 3])
    finished.answers, finished.path, finished.ended_ms = ["FINISHED"], "remote", 5_000
    failed = parts.jobs.Job("load-0", "load-0-1", 0, 4, "bb" * 8, "s", accepted=1, token_ids=[1])
    failed.answers, failed.lost, failed.ended_ms = ["PEER_LOST"], True, 3_000
    lives = []
    for node in ("decode", "prefill"):
        killed = parts.nodes.Life(node, 1, 10, directory, "bb" * 8, "killed", -9)
        last = parts.nodes.Life(node, 2, 11, directory, NODE, "drained", 0)
        last.resident = [(at_ms, 50.0 + at_ms / 10_000) for at_ms in range(0, 20_000, 500)]
        killed.leaving_ms = killed.ended_ms = 2_900
        last.leaving_ms, last.ended_ms = 8_000, 9_000
        lives += [killed, last]
    return parts.audit.Evidence(
        scenario=parts.scenario.EMULATED,
        questions=[question],
        jobs=[finished, failed],
        last_jobs=[finished],
        lives=lives,
        seen={"decode": parts.watch.Seen(answers=9, oldest_ms=20)},
        orphan_bound_ms=4_500,
        quiet_ms=10,
        quiet_bound_ms=7_000,
    )


def broken(parts: SimpleNamespace, evidence: Any) -> list[str]:
    return [line.name for line in parts.audit.audit(evidence) if line.holds is False]


def test_the_audit_of_a_good_run_holds(parts: SimpleNamespace, tmp_path: Path) -> None:
    assert all(line.holds for line in parts.audit.audit(good_evidence(parts, tmp_path)))


def test_a_short_run_without_evidence_does_not_claim_what_it_did_not_see(
    parts: SimpleNamespace, tmp_path: Path
) -> None:
    evidence = good_evidence(parts, tmp_path)
    evidence.seen = {"decode": parts.watch.Seen()}
    for life in evidence.lives:
        life.resident = []
        life.ready_ms = 2_000
    unsure = [line.name for line in parts.audit.audit(evidence) if line.holds is None]
    assert unsure == [ORPHANS, MEMORY]
    assert broken(parts, evidence) == []


def spoil(name: str, **changes: Any) -> Any:
    """Change fields of the first or the second job; `name` is where."""
    index = {"finished": 0, "failed": 1}[name]

    def change(evidence: Any) -> None:
        evidence.jobs[index] = replace(evidence.jobs[index], **changes)

    return change


def spoil_life(index: int, **changes: Any) -> Any:
    def change(evidence: Any) -> None:
        evidence.lives[index] = replace(evidence.lives[index], **changes)

    return change


def spoil_run(**changes: Any) -> Any:
    def change(evidence: Any) -> None:
        for name, value in changes.items():
            setattr(evidence, name, value)

    return change


ONCE, TOKENS = "every job answered exactly once", "tokens right, or their beginning"
HONEST, LOST = "errors honest and of a known kind", "clients lost only nodes that ended"
LAST, QUIET = "last jobs finished after the heal", "both nodes hold nothing in the end"
ENDINGS, MEMORY = "no node ended unasked or late", "memory flat"
ORPHANS = "no orphan older than its bound"
LONG = {"ready_ms": 0, "leaving_ms": 60_000, "ended_ms": 61_000}
GROWTH = [(0, 50.0), (3_000, 50.0), (20_000, 90.0)]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (ONCE, spoil("failed", answers=[])),
        (ONCE, spoil("finished", answers=["FINISHED", "FINISHED"])),
        (ONCE, spoil("finished", disorder=["Tokens after the end"])),
        (TOKENS, spoil("finished", token_ids=[1, 2])),
        (TOKENS, spoil("finished", token_ids=[1, 2, 4])),
        (TOKENS, spoil("failed", token_ids=[2])),
        (HONEST, spoil("failed", answers=["ENGINE_ERROR"], lost=False)),
        (HONEST, spoil("failed", answers=["SHUTTING_DOWN"], definite=True, lost=False)),
        (HONEST, spoil("failed", answers=["CANCELLED"], lost=False)),
        (HONEST, spoil("finished", accepted=0)),
        (LOST, spoil("failed", incarnation="cc" * 8)),
        (LOST, spoil("failed", ended_ms=1_000)),
        (LAST, spoil_run(last_jobs=[])),
        (QUIET, spoil_run(quiet_ms=None)),
        (ENDINGS, spoil_life(1, status=1)),
        (ENDINGS, spoil_life(0, how="by itself", status=4)),
        (ENDINGS, spoil_life(2, problem="not ready")),
        (MEMORY, spoil_life(3, resident=GROWTH)),
        (MEMORY, spoil_life(1, resident=[], **LONG)),
        (ORPHANS, spoil_life(3, **LONG)),
        ("logs clean", spoil_run(bad_lines=["decode node 1: invariant.violated"])),
        ("nothing left behind", spoil_run(remains=["/dev/shm/tandem-0"])),
        ("the run itself worked", spoil_run(faults=["relay: OSError"])),
    ],
)
def test_the_audit_finds_what_is_wrong(
    parts: SimpleNamespace, tmp_path: Path, name: str, change: Callable[[Any], None]
) -> None:
    evidence = good_evidence(parts, tmp_path)
    change(evidence)
    assert broken(parts, evidence) == [name]


def test_an_old_orphan_and_a_job_with_two_slots_are_found(parts: SimpleNamespace) -> None:
    slot = {"slot": 0, "state": "orphaned", "epoch": 1, "job": "a", "age_ms": 101}
    status = {"role": "prefill", "slots": [slot, {**slot, "state": "abandoned", "age_ms": 99}]}
    ages_ms, wrong = parts.watch.judge(status, bound_ms=100)
    assert ages_ms == [101, 99]
    assert len(wrong) == 1
    status["slots"] = [{**slot, "state": "producing"}, {**slot, "slot": 1, "state": "ready"}]
    assert len(parts.watch.judge(status, bound_ms=100)[1]) == 1


def test_the_schedule_follows_from_the_seed(parts: SimpleNamespace) -> None:
    def rows(seed: int) -> list[Any]:
        schedule, scenario = parts.schedule, parts.scenario.EMULATED
        endless = (
            schedule.node_acts(seed, "decode", scenario),
            schedule.node_acts(seed, "prefill", scenario),
            schedule.wire_acts(seed, scenario),
            schedule.stranger_acts(seed),
            schedule.client_acts(seed, scenario),
        )
        return [list(islice(row, 200)) for row in endless]

    first = rows(5)
    assert first == rows(5)
    assert first != rows(6)
    assert first[0] != first[1]
    kinds = [{act.kind for act in row} for row in first]
    schedule = parts.schedule
    assert kinds[0] == kinds[1] == set(schedule.NODE_KINDS)
    assert kinds[2:] == [set(schedule.WIRE_KINDS), set(schedule.STRANGER_KINDS), set(schedule.CLIENT_KINDS)]


@pytest.mark.parametrize("step_bytes", [1, 7, 10_000])
def test_the_wire_is_cut_into_messages_and_loses_no_byte(parts: SimpleNamespace, step_bytes: int) -> None:
    messages = [[b"tag", b"", b"x" * 300], [b"one"], [b"y" * 255, b"z" * 256]]
    command = bytes((4, 3)) + b"abc"
    stream = bytes(64) + command + b"".join(map(parts.wire.join, messages))
    splitter = parts.wire.Splitter()
    pieces = [
        piece
        for start_byte in range(0, len(stream), step_bytes)
        for piece in splitter.feed(stream[start_byte : start_byte + step_bytes])
    ]
    assert [piece.frames for piece in pieces if piece.frames is not None] == messages
    assert b"".join(piece.data for piece in pieces) == stream
