"""The scripts as a person runs them: up, send and demo, with emulated nodes.

Each script is a process of its own with a private runtime directory. One pair serves all tests of `send`; the
tests of `up` start their own, because they spoil it.
"""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from common.clock import now_ms, pause_ms
from tests.process.script_runs import (
    DEADLINE_MS,
    ROOT,
    SLOW,
    Script,
    Up,
    command,
    environment,
    run,
    sockets_in,
)
from transport.client import Client
from transport.launch.daemon_process import DaemonProcess
from transport.launch.pair_plan import EMULATED_MAX_TOKENS

DEMO_PROMPTS = ROOT / "scripts" / "demo_prompts.jsonl"


def send_json(runtime: Path, *arguments: str, given: bytes = b"") -> list[dict[str, Any]]:
    done = run(runtime, "send", "--json", *arguments, given=given)
    return [json.loads(line) for line in done.stdout.splitlines()]


def is_running(pid: int) -> bool:
    """Whether the process exists and is more than an unclaimed exit status."""
    status = Path(f"/proc/{pid}/status")
    try:
        return "\nState:\tZ" not in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def slabs_of(pid: int) -> list[Path]:
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return [Path(link) for link in links if link.startswith("/dev/shm/tandem-")]


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    """A pair for tests that leave it clean. A step takes 20 ms, so that a job can be caught running."""
    with TemporaryDirectory(prefix="tandem-test-") as directory:
        launched = Up(Path(directory), *SLOW)
        yield launched
        assert launched.stop() == 0, launched.errors
        assert sockets_in(launched.runtime) == []


def test_send_finds_the_pair_and_prints_the_text(up: Up) -> None:
    done = run(up.runtime, "send", "Hello", "--max-tokens", "4", "--ignore-eos", "--seed", "1")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.decode().removesuffix("\n")) == 4


def test_the_parts_of_the_timing_sum_to_the_total(up: Up) -> None:
    (job,) = send_json(up.runtime, "-", "--max-tokens", "3", "--ignore-eos", given=b"from a pipe\n")
    assert job["path"] == "remote"
    assert job["finish_reason"] == "length"
    assert len(job["token_ids"]) == job["usage"]["completion_tokens"] == 3
    assert sum(job["timings"]["stages_ms"].values()) == job["timings"]["total_ms"] > 0


def test_raw_leaves_out_the_chat_template(up: Up, tmp_path: Path) -> None:
    (raw,) = send_json(up.runtime, "abc", "--raw", "--max-tokens", "1")
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('{"prompt": "abc"}\n\n{"prompt_ids": [97], "label": "ids", "max_tokens": 2}\n')
    chat, ids = sorted(
        send_json(up.runtime, "--file", str(jobs), "--max-tokens", "1"), key=lambda job: job["label"]
    )
    assert raw["usage"]["prompt_tokens"] < chat["usage"]["prompt_tokens"]
    assert [chat["label"], ids["label"]] == ["1", "ids"]
    assert ids["usage"]["prompt_tokens"] == 1


def test_a_refused_job_is_told_with_code_and_advice_and_the_others_run(up: Up, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('{"prompt": "a", "max_tokens": 1}\n{"prompt": "b", "temperature": 9}\n')
    done = run(up.runtime, "send", "--file", str(jobs))
    assert done.returncode == 1
    assert b"job 2: INVALID_SAMPLING: temperature" in done.stderr
    assert b"what to do: correct the sampling field" in done.stderr
    assert done.stdout.startswith(b"[1] ")


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"prompt": 3}', "prompt must be text"),
        (b'{"prompt": "a", "top_q": 1}', "unknown field 'top_q'"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b"{'prompt'}", "not JSON"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_sent(up: Up, tmp_path: Path, line: bytes, fault: str) -> None:
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_bytes(b'{"prompt": "a"}\n' + line + b"\n")
    done = run(up.runtime, "send", "--file", str(jobs))
    assert done.returncode == 2
    assert done.stdout == b""
    message = done.stderr.decode()
    assert f"{jobs}, line 2: {fault}" in message
    assert "nothing was sent" in message


def test_a_wrong_endpoint_is_told_at_once(runtime: Path) -> None:
    done = run(runtime, "send", "a", "--endpoint", f"ipc://{runtime}/none")
    assert done.returncode == 1
    assert b"nobody listens" in done.stderr
    assert b"scripts/up.py" in done.stderr


def test_an_endpoint_where_nobody_listens_is_told_with_what_to_do(runtime: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
    done = run(runtime, "send", "a", "--endpoint", endpoint)
    assert done.returncode == 1
    assert f"nobody answers at {endpoint}".encode() in done.stderr
    assert b"start a pair with scripts/up.py" in done.stderr


def test_the_prompts_of_the_demonstration_fit_the_emulated_pair(up: Up) -> None:
    jobs = send_json(up.runtime, "--file", str(DEMO_PROMPTS), "--concurrency", "4", "--max-tokens", "2")
    assert len(jobs) == 8
    assert [job["label"] for job in jobs if "error" in job] == []
    prompt_tokens = max(job["usage"]["prompt_tokens"] for job in jobs)
    assert prompt_tokens + 128 <= EMULATED_MAX_TOKENS, "with the answer that send.py asks for by itself"


def test_ctrl_c_cancels_the_job(up: Up) -> None:
    cancelled = jobs_cancelled(up)
    sender = Script(up.runtime, "send", "a", "--max-tokens", "600", "--ignore-eos")
    sender.wait_for(lambda: sender.output)
    sender.process.send_signal(signal.SIGINT)
    assert sender.wait() == 6
    assert "1 of 1 jobs cancelled" in sender.errors
    assert jobs_cancelled(up) == cancelled + 1


def test_a_closed_pipe_ends_the_client_and_its_job(up: Up) -> None:
    cancelled = jobs_cancelled(up)
    sender = subprocess.Popen(
        command("send", "a", "--max-tokens", "600", "--ignore-eos"),
        env=environment(up.runtime),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    sender.stdout.read(1)
    sender.stdout.close()
    assert sender.wait(DEADLINE_MS / 1_000) == 6
    assert sender.stderr.read() == b""
    sender.stderr.close()
    up.wait_for(lambda: jobs_cancelled(up) == cancelled + 1)


def jobs_cancelled(up: Up) -> int:
    with Client(up.decode_endpoint) as client:
        return client.status()["counters"]["jobs_cancelled"]


def test_a_second_pair_does_not_clash_and_send_asks_which_one(up: Up) -> None:
    second = Up(up.runtime)
    done = run(up.runtime, "send", "a")
    assert done.returncode == 2
    assert f"--endpoint {up.decode_endpoint}" in done.stderr.decode()
    assert f"--endpoint {second.decode_endpoint}" in done.stderr.decode()
    (job,) = send_json(up.runtime, "a", "--max-tokens", "1", "--endpoint", second.decode_endpoint)
    assert job["path"] == "remote"
    assert second.stop() == 0, second.errors


def test_an_endpoint_in_use_is_an_error_that_spares_its_owner(up: Up) -> None:
    arguments = ("--backend", "emulated", "--decode-endpoint", up.decode_endpoint)
    done = run(up.runtime, "up", *arguments)
    assert done.returncode == 2
    assert done.stdout == b""
    assert b"the decode node ended with exit status 2 (CONFIG): ipc://" in done.stderr
    assert done.stderr.count(b"is in use") == 1
    (job,) = send_json(up.runtime, "a", "--max-tokens", "1")
    assert job["path"] == "remote"


def test_a_missing_prefill_node_is_told_by_its_code(runtime: Path) -> None:
    endpoint = f"ipc://{runtime}/decode"
    flags = ("--pd-prefill-worker", f"ipc://{runtime}/none", "--pd-remote-only", "--prefill-wait-ms", "100")
    decode = DaemonProcess("decode_node", ("--backend", "emulated", "--bind", endpoint, *flags), runtime)
    try:
        deadline_ms = now_ms() + DEADLINE_MS
        while not decode.ready():
            assert now_ms() < deadline_ms, decode.last_lines(5)
            pause_ms(10)
        done = run(runtime, "send", "a", "--endpoint", endpoint)
    finally:
        decode.kill()
    assert done.returncode == 1
    assert b"NO_PREFILL_NODE" in done.stderr
    assert b"start the prefill node" in done.stderr


def test_flags_that_a_daemon_refuses_are_told_once_with_exit_status_2(runtime: Path) -> None:
    done = run(runtime, "up", "--backend", "emulated", "--prefill-args", "--no-such-flag")
    told = done.stderr.decode()
    sentence = "unrecognized arguments: --no-such-flag"
    assert done.returncode == 2
    assert f"up: the prefill node ended with exit status 2 (CONFIG): {sentence}" in told
    assert told.count(sentence) == 1
    assert sockets_in(runtime) == []


def test_a_configuration_file_starts_a_pair_and_flags_beat_it(runtime: Path) -> None:
    path = runtime / "pair.toml"
    path.write_text(
        'backend = "emulated"\nemulated-seed = 3\n[decode]\nmax-queue = 7\npd-prefetch-next = 2\n'
        f'bind = "ipc://{runtime}/decode"\n'
    )
    up = Up(runtime, "--config", str(path), "--decode-args", "--max-queue", "9")
    try:
        assert up.decode_endpoint == f"ipc://{runtime}/decode"
        assert "prefetch 2" in up.output
        entries = [json.loads(line) for line in (up.log("decode_node")).read_text().splitlines()]
        [configured] = [entry for entry in entries if entry["event"] == "node.configured"]
        assert configured["max_queue"] == 9
        assert configured["origins"]["max_queue"] == "flag"
        assert configured["origins"]["emulated_seed"] == f"{path}: emulated-seed"
        (job,) = send_json(runtime, "a", "--max-tokens", "1")
        assert job["path"] == "remote"
    finally:
        assert up.stop() == 0, up.errors


def test_a_bad_configuration_file_is_told_before_anything_is_started(runtime: Path) -> None:
    path = runtime / "pair.toml"
    path.write_text("[decode]\nslot = 2\n")
    done = run(runtime, "up", "--config", str(path))
    assert done.returncode == 2
    assert done.stderr.decode() == (
        f"up: {path}: [decode] slot: there is no such option; did you mean slots?\n"
    )


def test_nodes_that_do_not_fit_together_are_told_with_what_to_do(runtime: Path) -> None:
    done = run(runtime, "up", "--backend", "emulated", "--prefill-args", "--emulated-seed", "1")
    told = done.stderr.decode()
    assert done.returncode == 1
    assert (
        "up: the decode node ended with exit status 3 (REFUSED): prefill node and decode node differ" in told
    )
    assert "model_id: emulated-1 and emulated-0" in told
    assert "what to do: start both nodes with the same --model" in told


def test_a_daemon_that_dies_ends_the_pair_with_its_last_words(runtime: Path) -> None:
    up = Up(runtime)
    pids, slabs = up.pids, slabs_of(up.pid("prefill_node"))
    assert slabs
    os.kill(up.pid("prefill_node"), signal.SIGKILL)
    assert up.wait() == 1
    assert "the prefill node was killed by SIGKILL; its last words:" in up.errors
    assert "node.ready" in up.errors
    assert not any(is_running(pid) for pid in pids)
    assert sockets_in(runtime) == []
    assert not any(slab.exists() for slab in slabs)


def test_a_second_ctrl_c_kills_at_once(runtime: Path) -> None:
    up = Up(runtime, *SLOW)
    pids = up.pids
    sender = Script(runtime, "send", "a", "--max-tokens", "900", "--ignore-eos")
    sender.wait_for(lambda: sender.output)
    up.process.send_signal(signal.SIGINT)
    up.wait_for(lambda: "draining" in up.errors)
    assert is_running(up.pid("decode_node"))
    up.process.send_signal(signal.SIGINT)
    assert up.wait() == 6
    assert not any(is_running(pid) for pid in pids)
    assert sockets_in(runtime) == []
    sender.kill()


def test_a_killed_launcher_takes_its_daemons_along_and_the_next_start_tidies_up(runtime: Path) -> None:
    first = Up(runtime)
    pids = first.pids
    os.kill(first.process.pid, signal.SIGSTOP)  # so that it cannot tidy up behind the decode node
    os.kill(pids[0], signal.SIGKILL)
    first.kill()
    first.wait_for(lambda: not any(is_running(pid) for pid in pids))
    assert sockets_in(runtime) == ["decode.sock", "decode.sock.lock"]
    second = Up(runtime)
    assert not list(first.directory.glob("*.sock*"))
    (job,) = send_json(runtime, "a", "--max-tokens", "1")
    assert job["path"] == "remote"
    assert second.stop() == 0, second.errors
    assert sockets_in(runtime) == []


def test_the_demonstration_compares_three_runs(runtime: Path) -> None:
    path = runtime / "demo.json"
    done = run(runtime, "demo", "--emulated", "--json", str(path))
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert result["tokens_equal"] is True
    assert result["remote_imports"] == 2 * result["jobs"] == 2 * len(result["answers"])
    assert result["local_prefill_tokens"] == 0
    assert result["prefetch_off"]["output_tokens"] == result["prefetch_on"]["output_tokens"] > 0
    assert 1 < result["ideal_speedup"] <= 2
    assert 0 < result["overlap_efficiency"] <= 1
    shown = done.stdout.decode()
    assert "Who worked when" in shown
    assert "AAA" in shown
    assert sockets_in(runtime) == []
