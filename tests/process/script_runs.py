"""Scripts as processes of their own, and the one way to wait for them.

Decides how a test runs a script: with a private runtime directory, so that it finds no pair but the test's,
and with what it wrote kept in files. Used by the tests of scripts.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.clock import now_ms, pause_ms

ROOT = Path(__file__).parents[2]
DEADLINE_MS = 60_000
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
    """`up.py` with emulated nodes, ready; without the gateway, unless its port is named."""

    def __init__(self, runtime: Path, *arguments: str) -> None:
        backend = () if "--config" in arguments else ("--backend", "emulated")
        gateway = () if "--http-port" in arguments else ("--no-gateway",)
        super().__init__(runtime, "up", *backend, *gateway, *arguments)
        self.wait_for(lambda: "\n" in self.output)
        words = self.output.replace(",", " ").split()
        assert words[:2] == ["ready:", "decode"]
        self.decode_endpoint, self.prefill_endpoint = words[2], words[words.index("prefill") + 1]
        announced = (runtime / "tandem").glob("pair-*/pair.json")
        self.directory = next(path.parent for path in announced if self.decode_endpoint in path.read_text())

    def log(self, program: str) -> Path:
        return self.directory / f"{program}.log"

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


def sockets_in(runtime: Path) -> list[str]:
    return sorted(path.name for path in runtime.rglob("*.sock*"))
