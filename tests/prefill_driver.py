"""A prefill core without its stack: events in, effects out, invariants checked after each step."""

from dataclasses import replace
from itertools import count
from typing import Any

from common.errors import ErrorCode
from common.messages import Hello, HelloOk, HelloRefused, Prefill, PrefillDone, PrefillFailed, Role
from prefill_node import events as ev
from prefill_node.core import PrefillCore
from tests.actors import names, prefill_settings
from tests.devices import CHUNK_TOKENS, PROFILE

BUDGET_MS = 1_500


class Node:
    """A prefill core, its clock, and what it has said."""

    def __init__(self, slots: int = 2, decode_nodes: int = 1) -> None:
        settings = prefill_settings("p1", slots, decode_nodes=decode_nodes)
        self.core = PrefillCore(settings, names("session"))
        self.now_ms = 0
        self.jobs = count(1)
        self.after_hello: list[Any] = []
        self.session = self.hello().session

    def step(self, event: Any, later_ms: int = 0) -> list[Any]:
        self.now_ms += later_ms
        effects = self.core.step(event, self.now_ms)
        self.core.check()
        return effects

    def hello(self, **changes: Any) -> HelloOk | HelloRefused:
        hello = replace(Hello("d1", 1, Role.DECODE, PROFILE), **changes)
        [answer, *self.after_hello] = self.step(ev.HelloReceived(b"route", hello))
        return answer.message

    def say(self, message: Any, session: str | None = None) -> list[Any]:
        return self.step(ev.MessageReceived(session or self.session, message))

    def prefill(self, slot: int, epoch: int, tokens: int = 6, **changes: Any) -> list[Any]:
        request = Prefill(f"job{next(self.jobs)}", slot, epoch, bytes(4 * tokens), "digest", 0, BUDGET_MS)
        return self.say(replace(request, **changes))

    def chunk(self, slot: int, epoch: int, later_ms: int = 0) -> list[Any]:
        event = ev.ChunkComputed(slot, epoch, 0, b"d" * 16, 700, b"logits", b"digest")
        return self.step(event, later_ms)

    def states(self) -> list[str]:
        return [slot["state"] for slot in self.core.status(self.now_ms)["slots"]]

    def bring(self, state: str) -> int:
        """Slot 0 or 1 in `state`, at epoch 1; its number."""
        if state == "queued":
            self.prefill(0, 1)
            self.prefill(1, 1)
            return 1
        if state != "idle":
            self.prefill(0, 1, tokens=CHUNK_TOKENS)
        if state == "held":
            self.chunk(0, 1)
        return 0


def completions(effects: list[Any]) -> list[Any]:
    sent = [effect.message for effect in effects if isinstance(effect, ev.SendMessage)]
    return [message for message in sent if isinstance(message, (PrefillDone, PrefillFailed))]


def ended(effects: list[Any]) -> bool:
    closed = [effect for effect in effects if isinstance(effect, ev.CloseSession)]
    return len(closed) == 1 and closed[0].reason.startswith(ErrorCode.PROTOCOL_ERROR)
