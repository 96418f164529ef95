"""`scripts/status.py` as a person runs it: on a pair, on one node, on nobody."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.process.script_runs import SLOW, Script, Up, run


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    with TemporaryDirectory(prefix="tandem-test-") as directory:
        launched = Up(Path(directory), *SLOW)
        yield launched
        assert launched.stop() == 0, launched.errors


def test_the_running_pair_is_found_and_shown(up: Up) -> None:
    done = run(up.runtime, "status")
    told = done.stdout.decode()
    assert (done.returncode, done.stderr) == (0, b"")
    assert f"decode node  {up.decode_endpoint}" in told
    assert f"prefill node  {up.prefill_endpoint}" in told
    assert told.count("ready, accepting") == 2


def test_one_node_is_enough(up: Up) -> None:
    done = run(up.runtime, "status", "--prefill", up.prefill_endpoint, "--json", "--once")
    assert done.returncode == 0
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert [list(nodes) for nodes in rounds] == [["prefill"]]
    status = rounds[0]["prefill"]["status"]
    assert status["role"] == "prefill"
    assert sorted(session["role"] for session in status["sessions"]) == ["client", "decode"]
    assert status["stale_messages"] == 0


def test_a_job_is_seen_in_its_lane_until_the_watch_is_stopped(up: Up) -> None:
    watch = Script(up.runtime, "status", "--json", "--interval", "0.1")
    sender = Script(up.runtime, "send", "a", "--max-tokens", "120", "--ignore-eos")
    try:
        lanes = watch.wait_for(
            lambda: [
                lane
                for line in watch.output.splitlines(keepends=True)
                if line.endswith("\n")
                for lane in json.loads(line)["decode"]["status"]["lanes"]
                if lane["state"] == "decoding"
            ]
        )
        assert lanes[0]["job"]
        assert sender.wait() == 0
        watch.process.send_signal(signal.SIGINT)
        assert watch.wait() == 0
        assert watch.errors == ""
    finally:
        watch.kill()
        sender.kill()


def test_a_node_that_goes_away_is_told_and_the_watch_goes_on(runtime: Path) -> None:
    up = Up(runtime)
    watch = Script(runtime, "status", "--json", "--interval", "0.1")
    try:
        watch.wait_for(lambda: "\n" in watch.output)
        assert up.stop() == 0
        watch.wait_for(lambda: "nobody answers at" in watch.output)
        assert watch.process.poll() is None
    finally:
        watch.kill()


def test_nobody_is_told_with_what_to_do(runtime: Path) -> None:
    done = run(runtime, "status", "--decode", f"ipc://{runtime}/none")
    assert (done.returncode, done.stdout) == (1, b"")
    [told] = done.stderr.decode().splitlines()
    assert told.startswith(f"status: decode node: nobody answers at ipc://{runtime}/none")
    assert "is the daemon running" in told


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--decode", "localhost:1"), "--decode 'localhost:1' is not an endpoint"),
        (("--interval", "0"), "--interval must be more than 0"),
    ],
)
def test_a_wrong_request_is_exit_status_2(runtime: Path, arguments: tuple[str, str], fault: str) -> None:
    done = run(runtime, "status", *arguments)
    assert done.returncode == 2
    assert fault in done.stderr.decode()
