"""Clients in processes of their own, which are killed, silenced or left alone in the middle of their jobs.

Decides how such a process is started and what its end must look like; `client_process.py` is the program. Its
output goes to a file, so that what it had heard before it was killed counts too. Started on the main thread.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from random import Random
from typing import Any

from chaos_parts.jobs import Job, Question, draw_job
from chaos_parts.nodes import Waits
from chaos_parts.scenario import Scenario
from chaos_parts.schedule import ClientAct
from common.clock import now_ms

JOBS = 3
_PROGRAM = Path(__file__).with_name("client_process.py")
_ROOT = Path(__file__).resolve().parents[2]
_POLL_MS = 20
_FIRST_TOKEN_MS = 3_000
_CONNECT_MS = 2_000


class ShortClient:
    """One such process. fault: what was wrong with its end."""

    def __init__(
        self,
        name: str,
        endpoint: str,
        questions: list[Question],
        scenario: Scenario,
        act: ClientAct,
        directory: Path,
    ) -> None:
        self.name = name
        self.fault = ""
        self._scenario = scenario
        self._act = act
        self._killed = self._silenced = False
        random = Random(act.seed)
        self._drawn = {f"{name}-{index}": draw_job(random, scenario)[:2] for index in range(JOBS)}
        given = {
            "endpoint": endpoint,
            "connect_ms": _CONNECT_MS,
            "times": astuple(scenario.client_times),
            "jobs": self._jobs_of(questions),
        }
        self._path = directory / f"{name}.out"
        self._errors_path = directory / f"{name}.err"
        self._process = self._start([sys.executable, str(_PROGRAM), json.dumps(given)])

    def _jobs_of(self, questions: list[Question]) -> dict[str, Any]:
        """What the program sends, by label."""
        return {
            label: {
                "prompt_ids": questions[question].prompt_ids,
                "sampling": {**questions[question].sampling, "max_tokens": max_tokens},
            }
            for label, (question, max_tokens) in self._drawn.items()
        }

    def _start(self, program: list[str]) -> subprocess.Popen:
        with self._path.open("wb") as output, self._errors_path.open("wb") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "transport.launch.bound_child", str(os.getpid()), *program],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                cwd=_ROOT,
                process_group=0,
            )

    def live(self) -> Waits:
        """From its start to its end."""
        deadline_ms = now_ms() + _FIRST_TOKEN_MS
        while not self._has_tokens() and self._process.poll() is None and now_ms() < deadline_ms:
            yield _POLL_MS
        yield self._act.hold_ms
        if self._process.poll() is None and self._act.kind == "kill a client":
            self._killed = True
            self._process.kill()
        elif self._process.poll() is None and self._act.kind == "silence a client":
            self._silenced = True
            self._process.send_signal(signal.SIGSTOP)
            yield self._scenario.times.lease_ms * 3 // 2
            self._process.send_signal(signal.SIGCONT)
        yield from self._wait()

    def _wait(self) -> Waits:
        bound_ms = self._scenario.job_timeout_ms + 2 * self._scenario.client_times.dead_after_ms
        deadline_ms = now_ms() + bound_ms
        while self._process.poll() is None:
            if now_ms() > deadline_ms:
                self.fault = f"{self.name} still waits for answers after {bound_ms} ms"
                self.kill()
                return
            yield _POLL_MS
        errors = self._errors_path.read_text(encoding="utf-8")
        if errors:
            self.fault = f"{self.name}: {errors.splitlines()[-1]}"

    def kill(self) -> None:
        """End it at once."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _lines(self) -> list[dict]:
        whole, _, _ = self._path.read_text(encoding="utf-8").rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def _has_tokens(self) -> bool:
        return '"kind": "Tokens"' in self._path.read_text(encoding="utf-8")

    def jobs(self) -> list[Job]:
        """The jobs that it had sent, with what it had heard of them."""
        jobs: dict[str, Job] = {}
        session = incarnation = ""
        for line in self._lines():
            if line["what"] == "session":
                session, incarnation = line["session"], line["incarnation"]
            elif line["what"] == "sent":
                label = line["label"]
                question, max_tokens = self._drawn[label]
                jobs[label] = Job(self.name, label, question, max_tokens, incarnation, session)
                jobs[label].client_killed = self._killed
                jobs[label].client_silenced = self._silenced
            elif line["label"] in jobs:
                jobs[line["label"]].take(line["kind"], line["fields"])
            else:
                self.fault = f"{self.name} got a message for no job: {line}"
        return list(jobs.values())
