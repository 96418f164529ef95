"""A decode node without jobs or engine, whose answers a test writes.

Decides only how a test tells it what to answer: `on_submit` gets a SUBMIT and returns messages. It answers
STATUS as a healthy node does until told otherwise.
"""

from collections.abc import Callable
from typing import Any

from common import client_messages as cm
from tests.gateway.harness import GatewayProcess
from tests.process.harness import wait_until
from tests.unit.test_client import Node

TIMINGS = cm.Timings(9, 4, {"queued": 2, "decoding": 7}, 0, 0, 0, 0, 0, None)
STATUS = {
    "ready": True,
    "accepting": True,
    "draining": False,
    "idle": True,
    "prefetch_depth": 1,
    "clients": 1,
    "max_tokens": 100,
    "jobs": {"queued": 2},
    "lanes": [{"lane": 0, "state": "free", "job": None}],
    "workers": [
        {
            "worker": "ipc://w",
            "usable": True,
            "orphans": 3,
            "survivors": [],
            "slots": [{"state": "orphaned"}],
            "counters": {"sessions": 1},
        }
    ],
    "counters": {"jobs_accepted": 5},
    "prefix_cache": {"blocks": 7},
}


def accepted(submit: cm.Submit) -> cm.Accepted:
    return cm.Accepted(submit.label, "job", 3)


def finished(submit: cm.Submit, reason: str = "stop", reasons: tuple[str, ...] = ()) -> cm.Finished:
    usage = cm.Usage(3, 2, 1, 2)
    return cm.Finished(submit.label, reason, "remote", usage, TIMINGS, reasons)


def served(submit: cm.Submit) -> list[Any]:
    """Accept and finish."""
    text = cm.Tokens(submit.label, (5, 6), "ab")
    return [accepted(submit), text, finished(submit)]


class ScriptedNode(Node):
    """Answers what its test says."""

    def __init__(self, endpoint: str) -> None:
        self.status: dict[str, Any] | None = STATUS
        self.on_submit: Callable[[cm.Submit], list[Any]] = served
        self.on_other: Callable[[Any], list[Any]] = lambda message: []
        super().__init__(endpoint, self._answers)

    def _answers(self, message: Any) -> list[Any]:
        if isinstance(message, cm.StatusRequest):
            return [] if self.status is None else [cm.StatusReply(self.status)]
        return self.on_submit(message) if isinstance(message, cm.Submit) else self.on_other(message)

    @property
    def submitted(self) -> list[cm.Submit]:
        return [message for message in list(self.received) if isinstance(message, cm.Submit)]

    @property
    def cancelled(self) -> list[str]:
        return [message.label for message in list(self.received) if isinstance(message, cm.CancelJob)]

    def wait_cancelled(self, count: int = 1) -> None:
        wait_until(lambda: len(self.cancelled) >= count, f"{count} jobs are cancelled", [])

    def wait_submitted(self, count: int = 1) -> None:
        wait_until(lambda: len(self.submitted) >= count, f"{count} jobs are submitted", [])


class Script:
    """A gateway and its node."""

    def __init__(self, gateway: GatewayProcess, node: ScriptedNode) -> None:
        self.gateway = gateway
        self.node = node

    def chat(self, **fields: Any) -> Any:
        return self.gateway.post("/v1/chat/completions", chat_body(**fields))

    def complete(self, **fields: Any) -> Any:
        return self.gateway.post("/v1/completions", {"model": "model", "prompt": "hello", **fields})


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "model", "messages": [{"role": "user", "content": "hello"}], **fields}
