"""The scripts as a person runs them: up, send and demo, with emulated nodes.

Each script is a process of its own with a private runtime directory. One pair serves all tests of `send`; the
tests of `up` start their own, because they spoil it.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from common.clock import now_ms, pause_ms
from transport.client import Client
from transport.launch.daemon_process import DaemonProcess

ROOT = Path(__file__).parents[2]
DEADLINE_MS = 30_000
SLOW = ("--decode-args", "--emulated-decode-ms", "20")


class Script:
    """A script that runs on its own, with what it wrote so far."""

    def __init__(self, runtime: Path, name: str, *arguments: str) -> None:
        self.runtime = runtime
        self.output_path = runtime / f"{name}-{now_ms()}.out"
        self.errors_path = self.output_path.with_suffix(".err")
        with self.output_path.open("wb") as output, self.errors_path.open("wb") as errors:
            self.process = subprocess.Popen(
                command(name, *arguments), env=environment(runtime), stdout=output, stderr=errors
            )

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    @property
    def errors(self) -> str:
        return self.errors_path.read_text()

    def wait_for(self, probe: Callable[[], Any]) -> Any:
        """The first true value of `probe`."""
        deadline_ms = now_ms() + DEADLINE_MS
        while not (found := probe()):
            assert now_ms() < deadline_ms, f"too late\n{self.output}\n{self.errors}"
            pause_ms(10)
        return found

    def wait(self) -> int:
        """The exit status."""
        return self.process.wait(DEADLINE_MS / 1_000)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Up(Script):
    """`up.py` with emulated nodes, ready."""

    def __init__(self, runtime: Path, *arguments: str) -> None:
        super().__init__(runtime, "up", "--backend", "emulated", *arguments)
        self.wait_for(lambda: "\n" in self.output)
        words = self.output.replace(",", " ").split()
        assert words[:2] == ["ready:", "decode"]
        self.decode_endpoint, self.prefill_endpoint = words[2], words[words.index("prefill") + 1]
        self.directory = Path(self.decode_endpoint.removeprefix("ipc://")).parent

    def pid(self, program: str) -> int:
        return json.loads((self.directory / f"{program}.out").read_text())["pid"]

    @property
    def pids(self) -> list[int]:
        return [self.pid("decode_node"), self.pid("prefill_node")]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.wait()


def command(name: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *arguments]


def environment(runtime: Path) -> dict[str, str]:
    return os.environ | {"XDG_RUNTIME_DIR": str(runtime), "PYTHONPATH": str(ROOT)}


def run(runtime: Path, name: str, *arguments: str, given: bytes = b"") -> subprocess.CompletedProcess:
    done = subprocess.run(
        command(name, *arguments),
        env=environment(runtime),
        input=given,
        capture_output=True,
        timeout=DEADLINE_MS / 1_000,
    )
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done


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


def sockets_in(runtime: Path) -> list[str]:
    return sorted(path.name for path in runtime.rglob("*.sock*"))


def slabs_of(pid: int) -> list[Path]:
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return [Path(link) for link in links if link.startswith("/dev/shm/tandem-")]


@pytest.fixture
def runtime() -> Iterator[Path]:
    # Not pytest's own directory: its path would not fit a socket.
    with TemporaryDirectory(prefix="tandem-test-") as directory:
        yield Path(directory)


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
    assert done.returncode == 1
    assert done.stdout == b""
    assert b"the decode node ended with exit status 2 (CONFIG)" in done.stderr
    assert b"is in use" in done.stderr
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
