"""Daemons that start at once, forked from a process that has imported everything already.

Decides how the process tests start emulated daemons: a fresh interpreter needs 0.7 s of a core for imports
alone, several hundred times. What is forked has made no thread, socket or ZeroMQ context yet, runs the module
as `python -m` would, and is a process of its own in everything else. Used by `tests.process.harness` alone.
Tests of the start itself, of scripts and of real models start interpreters of their own.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from common.clock import now_ms, pause_ms

ROOT = Path(__file__).parents[2]
REQUEST_BYTES = 2**18
POLL_MS = 2


class Nursling:
    """A daemon that was forked; offers what the tests use of `subprocess.Popen`."""

    def __init__(self, nursery: "Nursery", pid: int, stdout: int, stderr: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = os.fdopen(stdout, encoding="utf-8")
        self.stderr = os.fdopen(stderr, encoding="utf-8")
        self._nursery = nursery

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        last_ms = None if timeout is None else now_ms() + 1_000 * timeout
        while self.poll() is None:
            if last_ms is not None and now_ms() > last_ms:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout)
            pause_ms(POLL_MS)
        return self.returncode

    def send_signal(self, number: int) -> None:
        # Its exit status was not fetched, so the number is still its own.
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The tests' end: one process to fork from, for as long as the tests run."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.process.nursery", str(theirs.fileno())]
        self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
        theirs.close()

    def start(self, program: str, flags: tuple[str, ...], environment: dict[str, str]) -> Nursling:
        """Run `python -m program flags`."""
        stdout, their_stdout = os.pipe()
        stderr, their_stderr = os.pipe()
        request = {"start": [program, *flags], "environment": environment}
        pid = self.ask(request, [their_stdout, their_stderr])
        os.close(their_stdout)
        os.close(their_stderr)
        return Nursling(self, pid, stdout, stderr)

    def ask(self, request: dict[str, Any], descriptors: list[int] | None = None) -> Any:
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors or [])
        return json.loads(self._socket.recv(REQUEST_BYTES))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def serve(connection: socket.socket) -> tuple[list[str], dict[str, str]] | None:
    """Fork whenever asked to. Returns in each child, with what it is to run, and when the tests are over."""
    children: set[int] = set()
    while True:
        text, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 2)
        if not text:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            return None
        request = json.loads(text)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            children.discard(pid)
            connection.send(json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode())
            continue
        pid = os.fork()
        if pid == 0:
            connection.close()
            for number, descriptor in enumerate(descriptors, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            return request["start"], request["environment"]
        children.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(json.dumps(pid).encode())


def main() -> None:
    # What a daemon imports after it has read its command line.
    import decode_node.node  # noqa: F401
    import prefill_node.node  # noqa: F401

    work = serve(socket.socket(fileno=int(sys.argv[1])))
    if work is not None:
        (program, *flags), environment = work
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [program, *flags]
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
