"""The benchmark's launcher of daemons without checks still finds every function that it switches off, and
what it starts still finishes jobs.

Run in processes of their own, because the patches last.
"""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from transport.client import Client
from transport.launch.pair import Pair
from transport.launch.pair_plan import PairPlan

ROOT = Path(__file__).parents[2]
CODE = """
from scripts.benchmarks.unchecked import switch_off
switch_off("{node}")
from transport.peers import Session
from common.messages import Role
session = Session("s", Role.CLIENT, b"", 0)
assert session.accept(7, 5) and (session.received, session.heard_ms) == (7, 5)
from {node} import compute, core
assert compute.bytes_digest(b"a") == compute.bytes_digest(b"b")
"""


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("node", ["decode_node", "prefill_node"])
def test_everything_that_is_switched_off_still_exists(node: str) -> None:
    done = run(CODE.format(node=node))
    assert done.returncode == 0, done.stderr


def test_a_function_that_has_moved_is_told() -> None:
    code = 'import scripts.benchmarks.unchecked as unchecked, common\nunchecked._replace(common, "gone", 1)'
    done = run(code)
    assert done.returncode == 1
    assert "common has no gone any more" in done.stderr


def test_a_pair_without_checks_finishes_a_job_over_the_prefill_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    robustness = import_module("benchmarks.robustness")
    job = robustness.BatchJob("job", prompt_ids=[97] * 40, sampling={"max_tokens": 3, "ignore_eos": True})
    plan = PairPlan("emulated", prefetch_depth=1)
    with Pair(plan, robustness.UncheckedDaemon) as pair:
        pair.wait_ready(timeout_ms=60_000)
        assert all(robustness.NOTE in daemon.log_path.read_text() for daemon in pair.daemons)
        with Client(pair.decode_endpoint) as client:
            (outcome,) = robustness._finish(client, [job], concurrency=1)
    assert len(outcome.token_ids) == 3
