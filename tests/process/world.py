"""A private world of daemons and clients for one test, and the audit at its end.

Decides how nodes are paired, how clients are driven and what a clean end is. Used by the fixtures of
`tests/process/conftest.py`. Every wait turns every client, because a client that is not turned counts as
silent and loses its jobs.
"""

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from common.client_messages import TokenLogprob
from common.errors import NodeUnavailable
from common.messages import Accepted, Failed, Finished, Rejected, Tokens
from tests import oracle
from tests.process.harness import DEADLINE_MS, LEASE, POLL_MS, STALL_MS, START_MS, TIMES, Daemon, wait_until
from transport.client import Client
from transport.peers import LivenessTimes

COMMON = (*TIMES, *LEASE, "--log-form", "json")
REMOTE = ("--pd-remote-only",)
PREFETCH = ("--pd-remote-only", "--pd-prefetch-next")


@cache
def _expected(prompt_ids: tuple[int, ...], max_tokens: int, seed: int, others: tuple) -> list[int]:
    return oracle.expected_tokens(prompt_ids, max_tokens, seed, **dict(others))


def expected(prompt_ids: list[int], max_tokens: int, seed: int = 0, **others: Any) -> list[int]:
    """Token ids that the model must answer with; computed once for each question."""
    return _expected(tuple(prompt_ids), max_tokens, seed, tuple(sorted(others.items())))


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """A prompt of lower-case bytes, another one for each salt."""
    return [97 + (position * 7 + position * position * (salt + 1) + salt) % 26 for position in range(length)]


@dataclass
class Answer:
    """What a client has heard of one job. `end` is its one terminal message."""

    accepted: Accepted | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    choice_ids: list[tuple[int, int]] = field(default_factory=list)
    end: Finished | Failed | Rejected | None = None

    @property
    def code(self) -> str | None:
        """Error code of a job that failed or was rejected."""
        return None if self.end is None or isinstance(self.end, Finished) else str(self.end.code)


# A node that a test stops on purpose must not count as dead here; how a client gives up is tested on its own.
PATIENT = LivenessTimes(ping_ms=200, suspect_ms=20_000, dead_after_ms=30_000, lease_ms=40_000)


class JobClient:
    """A client that keeps what it hears, label by label."""

    def __init__(self, endpoint: str) -> None:
        self._client = Client(endpoint, times=PATIENT)
        self.answers: dict[str, Answer] = {}
        self.other: list[Any] = []

    def submit(self, label: str, prompt_ids: list[int], **sampling: Any) -> Answer:
        """Send a job; its answer fills while the world waits."""
        answer = self.answers[label] = Answer()
        self._client.submit(label, prompt_ids=prompt_ids, sampling=sampling)
        return answer

    def submit_body(self, label: str, **body: Any) -> Answer:
        """Send a job with any body that the client class lets through."""
        answer = self.answers[label] = Answer()
        self._client.submit(label, **body)
        return answer

    def cancel(self, label: str) -> None:
        self._client.cancel(label)

    def turn(self) -> None:
        """Take what has arrived; waits a little when nothing has."""
        for message in self._client.events(timeout_ms=POLL_MS):
            answer = self.answers.get(getattr(message, "label", None))
            match message:
                case Accepted():
                    answer.accepted = message
                case Tokens(token_ids=token_ids, text=text):
                    assert answer.end is None, "tokens after the end of their job"
                    answer.token_ids += token_ids
                    answer.text += text
                    answer.logprobs += message.logprobs
                    answer.choice_ids += [(message.choice, token_id) for token_id in token_ids]
                case Finished() | Failed() | Rejected():
                    assert answer.end is None, "a job was answered twice"
                    answer.end = message
                case _:
                    self.other.append(message)

    def close(self) -> None:
        self._client.close()


class World:
    """Daemons and clients of one test or module.

    conditions: what `tests/process/matrix_daemon.py` makes worse for each daemon.
    """

    def __init__(self, directory: Path, conditions: dict[str, Any] | None = None) -> None:
        self.directory = directory
        self.conditions = conditions
        self.daemons: list[Daemon] = []
        self.clients: list[JobClient] = []

    def launch(
        self,
        program: str,
        *flags: str,
        name: str | None = None,
        bind: str | None = None,
        wait_for: Path | None = None,
    ) -> Daemon:
        """Start a daemon without waiting for it. The last of repeated flags counts.

        wait_for: it loads its code and begins when this file is there; see `matrix_daemon`.
        """
        name = name or f"{program[0]}{len(self.daemons)}"
        bind = bind or f"ipc://{self.directory}/{name}"
        flags = ("--backend", "emulated", "--stall-ms", str(STALL_MS), *COMMON, "--bind", bind, *flags)
        conditions = {**(self.conditions or {}), **({} if wait_for is None else {"wait_for": str(wait_for)})}
        wrapper = ("tests.process.matrix_daemon", json.dumps(conditions)) if conditions else ()
        daemon = Daemon(program, name, self.directory, flags, wrapper)
        self.daemons.append(daemon)
        return daemon

    def prefill(self, *flags: str, **options: Any) -> Daemon:
        """A prefill node that is ready."""
        return self.ready(self.launch("prefill_node", *flags, **options))

    def decode(self, worker: Daemon | str | None, *flags: str, **options: Any) -> Daemon:
        """A decode node that is ready; `worker` is its prefill node or where that will be."""
        endpoint = worker.endpoint if isinstance(worker, Daemon) else worker
        route = () if endpoint is None else ("--pd-prefill-worker", endpoint)
        return self.ready(self.launch("decode_node", *route, *flags, **options))

    def pair(self, prefill: tuple[str, ...] = (), decode: tuple[str, ...] = PREFETCH) -> "Pair":
        """A prefill and a decode node with an open session."""
        endpoint = f"ipc://{self.directory}/prefill"
        source = self.launch("prefill_node", *prefill, name="prefill", bind=endpoint)
        # Both import at the same time, but the one that is connected to is there first.
        self.wait_for_log(source, "node.configured")
        lane = self.launch("decode_node", "--pd-prefill-worker", endpoint, *decode, name="decode")
        for daemon in (source, lane):
            self.ready(daemon)
        self.wait_for_log(lane, "session.opened")
        return Pair(self, source, lane)

    def ready(self, daemon: Daemon) -> Daemon:
        """Wait for the ready line."""

        def probe() -> bool:
            assert daemon.status is None, f"ended instead of getting ready\n{daemon.tail()}"
            return daemon.ready()

        self.wait(probe, f"{daemon.name} is ready", START_MS)
        return daemon

    def client(self, daemon: Daemon) -> JobClient:
        """A client of a decode node, turned by every wait."""
        client = JobClient(daemon.endpoint)
        self.clients.append(client)
        return client

    def wait(self, probe: Callable[[], Any], what: str, deadline_ms: int = DEADLINE_MS) -> Any:
        """Wait until `probe` is true, turning all clients meanwhile."""
        between = {"between": self._turn_clients} if self.clients else {}
        return wait_until(probe, what, self.daemons, deadline_ms=deadline_ms, **between)

    def _turn_clients(self) -> None:
        for client in self.clients:
            client.turn()

    def wait_for_log(
        self, daemon: Daemon, event: str, count: int = 1, deadline_ms: int = DEADLINE_MS, **fields: Any
    ) -> dict[str, Any]:
        """Wait for the `count`-th such entry."""
        what = f"{daemon.name} logs {event} {fields} ({count})"
        self.wait(lambda: len(daemon.logged(event, **fields)) >= count, what, deadline_ms)
        return daemon.logged(event, **fields)[count - 1]

    def wait_held(self, daemon: Daemon, point: str, count: int = 1) -> None:
        """Wait until a thread stands at the point for the `count`-th time."""
        self.wait_for_log(daemon, "hook.held", count, point=point)

    def status(self, daemon: Daemon) -> dict[str, Any]:
        """The node's STATUS, asked for by a client of its own."""
        with Client(daemon.endpoint, times=PATIENT) as client:
            return client.status()

    def wait_status(
        self, daemon: Daemon, condition: Callable[[dict], bool], what: str, deadline_ms: int = DEADLINE_MS
    ) -> dict[str, Any]:
        """Wait until STATUS fulfils the condition; that STATUS."""
        last: dict[str, Any] = {}

        def probe() -> bool:
            last.update(client.status())
            return condition(last)

        try:
            with Client(daemon.endpoint, times=PATIENT) as client:
                self.wait(probe, what, deadline_ms)
        except AssertionError as error:
            raise AssertionError(f"{error}\nlast STATUS: {last}") from None
        return last

    def end_of(self, answer: Answer, deadline_ms: int = DEADLINE_MS) -> Answer:
        """Wait for a job's terminal answer."""
        self.wait(lambda: answer.end is not None, "a job ends", deadline_ms)
        return answer

    def exit_of(self, daemon: Daemon, deadline_ms: int = DEADLINE_MS) -> int:
        """Wait for a daemon's end; its exit status."""
        self.wait(daemon.gone, f"{daemon.name} ends", deadline_ms)
        return daemon.status

    def stop(self, daemon: Daemon) -> None:
        """An orderly end: exit status 0, nothing left behind."""
        daemon.signal(signal.SIGTERM)
        assert self.exit_of(daemon) == 0, daemon.tail()
        self.check_remains(daemon)

    def kill(self, daemon: Daemon) -> None:
        """SIGKILL, and wait for it."""
        daemon.signal(signal.SIGKILL)
        assert self.exit_of(daemon) == -signal.SIGKILL

    def check_remains(self, daemon: Daemon) -> None:
        """What a process that ended by itself must not leave: files, other output, a broken invariant."""
        assert daemon.files_left() == []
        assert len(daemon.output) <= 1, "stdout is for the ready line alone"
        assert daemon.logged("invariant.violated") == []
        assert daemon.complaints == []

    def close(self) -> None:
        """End everything, whatever the test left running."""
        for client in self.clients:
            try:
                client.turn()
                client.close()
            except NodeUnavailable:
                continue
        for daemon in self.daemons:
            if daemon.status is None:
                daemon.signal(signal.SIGKILL)
            wait_until(daemon.gone, f"{daemon.name} is killed", [])
        for daemon in self.daemons:
            for left in daemon.files_left():
                Path(left).unlink(missing_ok=True)
        broken = [daemon for daemon in self.daemons if daemon.logged("invariant.violated")]
        assert not broken, "\n".join(daemon.tail() for daemon in broken)


class Pair:
    """A prefill node and a decode node that work together, and the client of most tests."""

    def __init__(self, world: World, prefill: Daemon, decode: Daemon) -> None:
        self.world = world
        self.prefill = prefill
        self.decode = decode
        self._client: JobClient | None = None

    @property
    def client(self) -> JobClient:
        if self._client is None:
            self._client = self.world.client(self.decode)
        return self._client

    def run(self, label: str, prompt_ids: list[int], **sampling: Any) -> Answer:
        """Submit a job and wait for its end."""
        return self.world.end_of(self.client.submit(label, prompt_ids, **sampling))

    def check_job(self, label: str, prompt_ids: list[int], max_tokens: int = 12, seed: int = 0) -> Answer:
        """Run a job that must finish with the oracle's tokens."""
        answer = self.run(label, prompt_ids, max_tokens=max_tokens)
        assert isinstance(answer.end, Finished), answer.end
        assert answer.token_ids == expected(prompt_ids, max_tokens, seed)
        return answer

    def slots(self) -> list[str]:
        """States of the granted slots, as the decode node sees them."""
        return [slot["state"] for slot in self.world.status(self.decode)["workers"][0]["slots"]]

    def wait_slot(self, state: str) -> dict[str, Any]:
        """Wait until a granted slot is in this state; the STATUS of that moment."""

        def condition(status: dict[str, Any]) -> bool:
            return any(slot["state"] == state for slot in status["workers"][0]["slots"])

        return self.world.wait_status(self.decode, condition, f"a slot is {state}")

    def wait_clean(self) -> dict[str, Any]:
        """Wait until nothing is held on either side; the decode node's STATUS."""
        status = self.world.wait_status(self.decode, _is_clean, "the decode node is clean")
        self.world.wait_status(self.prefill, _prefill_is_clean, "the prefill node is clean")
        return status

    def counts(self) -> dict[str, int]:
        """What both nodes have counted so far."""
        decode, prefill = self.world.status(self.decode), self.world.status(self.prefill)
        return {**decode["counters"], **decode["workers"][0]["counters"], **prefill["counters"]}

    def check_counts(self, before: dict[str, int], **grown_by: int) -> None:
        """Wait until nothing is held; the named counters have grown by so much since `before`."""
        self.wait_clean()
        after = self.counts()
        assert {name: after[name] - before[name] for name in grown_by} == grown_by

    def audit(self, imports: int | None = None, local_tokens: int = 0) -> None:
        """Both nodes hold nothing, did what they were meant to, and end in good order.

        imports: how many jobs took their KV from the prefill node; None when that depends on timing.
        """
        counters = self.wait_clean()["counters"]
        if imports is not None:
            assert counters["remote_imports"] == imports
        assert counters["local_prefill_tokens"] == local_tokens
        for daemon in (self.decode, self.prefill):
            daemon.signal(signal.SIGTERM)
            self.world.wait_for_log(daemon, "node.stopped", status=0)
        for daemon in (self.decode, self.prefill):
            assert self.world.exit_of(daemon) == 0
            self.world.check_remains(daemon)


def _is_clean(status: dict[str, Any]) -> bool:
    worker = status["workers"][0]
    states = [slot["state"] for slot in worker["slots"]] + [lane["state"] for lane in status["lanes"]]
    quiet = not status["jobs"] and not worker["survivors"] and not worker["orphans"]
    return status["idle"] and quiet and set(states) == {"free"}


def _prefill_is_clean(status: dict[str, Any]) -> bool:
    return not status["queued"] and {slot["state"] for slot in status["slots"]} <= {"idle", "pool"}
