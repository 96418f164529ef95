"""What the stacks of both nodes have in common: layers whose effects are each other's events.

Decides the order in which effects are carried on, and how a core's words to its sessions become those of
the listener. Base of `prefill_node.stack` and `decode_node.stack`, which say which layer takes what. It must
never do I/O: what no layer takes is for the wiring.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from common.messages import StatusReply
from transport.listener import Listener
from transport.peers import Answer, EndSession, Post

Handler = Callable[[Any, int], list[Any]]


class Stack:
    """A listener, a core, and whatever else a node adds."""

    def __init__(self, listener: Listener, core: Any, handlers: dict[type, Handler]) -> None:
        """handlers: which method takes which event or effect."""
        self.listener = listener
        self.core = core
        self._handlers = handlers

    def step(self, event: Any, now_ms: int) -> list[Any]:
        """The only door. Takes events of the wire, of the core, and Tick; what is to be done outside."""
        outside: list[Any] = []
        pending: deque[Any] = deque([event])
        while pending:
            item = pending.popleft()
            handler = self._handlers.get(type(item))
            if handler is None:
                outside.append(item)
                continue
            outside += self._news(item)
            pending.extend(handler(item, now_ms))
        return outside

    def _news(self, item: Any) -> list[Any]:
        """What the wiring is told although a layer takes it."""
        raise AssertionError("each node says it itself")

    def _to_listener(self, event: Any, now_ms: int) -> list[Any]:
        return self.listener.step(event, now_ms)

    def _to_core(self, event: Any, now_ms: int) -> list[Any]:
        return self.core.step(event, now_ms)

    def _on_answer(self, effect: Any, now_ms: int) -> list[Any]:
        """The core's answer to a HELLO: `route`, `message`."""
        return self.listener.step(Answer(effect.route, effect.message), now_ms)

    def _on_send(self, effect: Any, now_ms: int) -> list[Any]:
        """The core's message in a session: `session`, `message`."""
        message = effect.message
        if isinstance(message, StatusReply):
            message = StatusReply({**message.body, **self._session_status(now_ms)})
        return self.listener.step(Post(effect.session, message), now_ms)

    def _on_close(self, effect: Any, now_ms: int) -> list[Any]:
        """The core ends a session: `session`, `reason`."""
        return self.listener.step(EndSession(effect.session, effect.reason), now_ms)

    def _session_status(self, now_ms: int) -> dict[str, Any]:
        """What the sessions add to STATUS."""
        return self.listener.status(now_ms)
