"""What both nodes say and use while the run goes on.

Decides how often STATUS is asked for and memory is read, and what in an answer contradicts itself. One thread
of its own, with a client of its own at each node, so that a node that is stopped or away delays nobody else.
It must never judge a node by an answer that did not come: that is the business of the audit at the end.
"""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_parts.nodes import ChaosNode
from chaos_parts.scenario import Scenario
from common import limits
from common.clock import now_ms
from common.errors import NodeUnavailable
from transport.client import Client

_EVERY_MS = 150
_ASK_MS = 400
# Between an answer and the step that would have ended what is overdue.
_MARGIN_MS = 500


@dataclass(slots=True)
class Seen:
    """What was seen of all STATUS answers. oldest_ms: greatest age of an orphan or abandoned production."""

    answers: int = 0
    oldest_ms: int = 0
    contradictions: list[str] = field(default_factory=list)


class Watch(threading.Thread):
    """Asks both nodes again and again; `seen` and each life's `resident` are what it found."""

    def __init__(self, nodes: list[ChaosNode], scenario: Scenario) -> None:
        super().__init__(name="watch", daemon=True)
        self.seen = {node.name: Seen() for node in nodes}
        self.fault = ""
        self._nodes = nodes
        self._clients: dict[str, Client] = {}
        self._leave = threading.Event()
        self.bound_ms = orphan_bound_ms(scenario)

    def leave(self) -> None:
        """End the thread."""
        self._leave.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        """The thread's work."""
        try:
            while not self._leave.wait(_EVERY_MS / 1_000):
                for node in self._nodes:
                    self._measure(node)
                    self._ask(node)
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"
            raise
        finally:
            for client in self._clients.values():
                client.close()

    def _measure(self, node: ChaosNode) -> None:
        life = node.life
        resident_mib = resident(life.pid) if life.ready_ms is not None and life.ended_ms is None else None
        if resident_mib is not None:
            life.resident.append((now_ms() - life.ready_ms, resident_mib))

    def _ask(self, node: ChaosNode) -> None:
        if node.stopped or not node.running:
            return
        try:
            if node.name not in self._clients:
                self._clients[node.name] = Client(node.endpoint, _ASK_MS)
            status = self._clients[node.name].status(_ASK_MS)
        except NodeUnavailable:
            client = self._clients.pop(node.name, None)
            if client is not None:
                client.close()
            return
        seen = self.seen[node.name]
        seen.answers += 1
        ages_ms, contradictions = judge(status, self.bound_ms)
        seen.oldest_ms = max([seen.oldest_ms, *ages_ms])
        seen.contradictions += contradictions


def orphan_bound_ms(scenario: Scenario) -> int:
    """The oldest that an orphan may get: then its session ends."""
    return scenario.stall_ms + scenario.times.dead_after_ms + limits.ORPHAN_GRACE_MS + _MARGIN_MS


def resident(pid: int) -> float | None:
    """Resident memory of a process in MiB; None when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    kilobytes = next((line.split()[1] for line in lines if line.startswith("VmRSS")), None)
    return None if kilobytes is None else int(kilobytes) / 1_024


def workers_of(status: dict[str, Any]) -> list[dict[str, Any]]:
    """The decode node's view of its prefill nodes; a prefill node has none."""
    return status.get("workers", [])


def judge(status: dict[str, Any], bound_ms: int) -> tuple[list[int], list[str]]:
    """Ages of what waits for a producer that nobody wants any more, and what is wrong with an answer."""
    slots = [slot for worker in workers_of(status) for slot in worker["slots"]]
    slots += status["slots"] if status["role"] == "prefill" else []
    ages_ms = [slot["age_ms"] for slot in slots if slot["state"] in ("orphaned", "abandoned")]
    wrong = [f"{status['role']}: an orphan is {age} ms old" for age in ages_ms if age > bound_ms]
    jobs = [slot["job"] for slot in slots if slot["state"] in ("producing", "ready", "importing")]
    if len(set(jobs)) != len(jobs):
        wrong.append(f"{status['role']}: one job holds two slots: {slots}")
    lanes = [lane["job"] for lane in status.get("lanes", []) if lane["job"] is not None]
    if len(set(lanes)) != len(lanes):
        wrong.append(f"{status['role']}: one job holds two lanes")
    return ages_ms, wrong


def is_quiet(status: dict[str, Any]) -> bool:
    """Whether a node holds, owes, copies and computes nothing."""
    if status["role"] == "prefill":
        return not status["queued"] and {slot["state"] for slot in status["slots"]} <= {"idle", "pool"}
    workers = workers_of(status)
    states = {slot["state"] for worker in workers for slot in worker["slots"]}
    states |= {lane["state"] for lane in status["lanes"]}
    left = any(worker["survivors"] or worker["orphans"] for worker in workers)
    return status["idle"] and status["accepting"] and not status["jobs"] and not left and states == {"free"}
