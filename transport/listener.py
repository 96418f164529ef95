"""The binding side's sessions.

Decides which peers behind a ROUTER have a session, which HELLO counts, and what is answered to messages of no
session. Stepped by a node's stack; pure, see `transport.peers`. It must never decide whether a peer is
welcome: it hands a HELLO on and takes the node's answer.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from common import limits
from common.errors import ErrorCode
from common.messages import Bye, Hello, HelloOk, HelloRefused, Ping, Pong, Role, SessionGone
from transport.peers import (
    Answer,
    BadFrame,
    Delivered,
    EndSession,
    FrameReceived,
    HelloArrived,
    LivenessTimes,
    Mistake,
    Post,
    RouteLost,
    SendFrame,
    Session,
    SessionEnded,
    Tick,
)

# Each role has room of its own: a crowd of clients must not lock a decode node out.
_SESSIONS = {Role.CLIENT: limits.SESSIONS, Role.DECODE: limits.DECODE_SESSIONS}


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The newest HELLO of one incarnation and what became of it."""

    number: int
    route: bytes
    role: Role
    answer: HelloOk | HelloRefused | None = None


class Listener:
    """All sessions of a binding node. `progress` is asked for PONG: chunks or steps finished so far."""

    def __init__(self, times: LivenessTimes, progress: Callable[[], int]) -> None:
        self._times = times
        self._progress = progress
        self._sessions: dict[str, Session] = {}
        self._attempts: OrderedDict[tuple[Role, str], _Attempt] = OrderedDict()
        self.stale_messages = 0
        self._handlers = {
            FrameReceived: self._on_frame,
            BadFrame: self._on_bad_frame,
            RouteLost: self._on_route_lost,
            Post: self._on_post,
            Answer: self._on_answer,
            EndSession: self._on_end,
            Tick: self._on_tick,
        }

    def step(self, event: Any, now_ms: int) -> list[Any]:
        """The only door. Effects: SendFrame, HelloArrived, SessionEnded, Delivered, Mistake."""
        return self._handlers[type(event)](event, now_ms)

    def deadline_ms(self) -> int | None:
        """When `step(Tick)` is due at the latest."""
        if not self._sessions:
            return None
        return min(session.heard_ms for session in self._sessions.values()) + self._times.lease_ms

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Open sessions, for STATUS; not to be changed."""
        return tuple(self._sessions.values())

    def status(self, now_ms: int) -> dict[str, Any]:
        """What the sessions add to a node's STATUS."""
        described = [
            {"session": each.identity, "role": str(each.role), "silent_ms": now_ms - each.heard_ms}
            for each in self._sessions.values()
        ]
        return {"sessions": described, "stale_messages": self.stale_messages}

    def _on_frame(self, event: FrameReceived, now_ms: int) -> list[Any]:
        message = event.message
        if isinstance(message, Hello):
            return self._on_hello(event.route, message)
        session = self._sessions.get(event.session) if event.session else None
        if session is None or session.route != event.route:
            self.stale_messages += 1
            if isinstance(message, (Bye, SessionGone, HelloOk, HelloRefused)) or event.session is None:
                return []
            return [SendFrame(event.route, None, 0, SessionGone(event.session))]
        if isinstance(message, SessionGone):
            return self._finish(session, "the peer no longer knows the session")
        if not session.accept(event.sequence, now_ms):
            reason = f"{ErrorCode.SEQUENCE_ERROR}: expected {session.received + 1}, got {event.sequence}"
            return self._end(session, reason)
        if isinstance(message, Bye):
            return self._finish(session, f"bye: {message.reason}")
        if isinstance(message, Ping):
            return [session.frame(Pong(event.sequence, self._progress()))]
        return [Delivered(session.identity, message)]

    def _on_bad_frame(self, event: BadFrame, now_ms: int) -> list[Any]:
        session = next((known for known in self._sessions.values() if known.route == event.route), None)
        if session is None:
            self.stale_messages += 1
            if event.code is not ErrorCode.VERSION_MISMATCH:
                return []
            refusal = HelloRefused(False, event.detail, ("version",))
            return [SendFrame(event.route, None, 0, refusal)]
        in_order = event.session == session.identity and session.accept(event.sequence, now_ms)
        if session.role is Role.CLIENT and in_order:
            return [Mistake(session.identity, event.code, event.detail)]
        return self._end(session, f"{ErrorCode.PROTOCOL_ERROR}: {event.detail}")

    def _on_hello(self, route: bytes, hello: Hello) -> list[Any]:
        # By role too: what a client says must not end the session of a decode node.
        name = hello.role, hello.incarnation
        known = self._attempts.get(name)
        if known is not None and hello.attempt <= known.number:
            if hello.attempt == known.number and known.route == route and known.answer is not None:
                return [SendFrame(route, None, 0, known.answer)]
            self.stale_messages += 1
            return []
        earlier = self._session_of(known)
        effects: list[Any] = []
        if earlier is not None:
            effects += self._finish(earlier, "superseded by a newer attempt of the same node")
        limit = _SESSIONS[hello.role]
        if sum(session.role is hello.role for session in self._sessions.values()) >= limit:
            refusal = HelloRefused(True, f"{limit} sessions of role {hello.role} are open already")
            return [*effects, SendFrame(route, None, 0, refusal)]
        self._attempts[name] = _Attempt(hello.attempt, route, hello.role)
        self._attempts.move_to_end(name)
        self._forget_old_attempts()
        return [*effects, HelloArrived(route, hello)]

    def _session_of(self, attempt: _Attempt | None) -> Session | None:
        """The open session that an attempt has led to."""
        if attempt is None or not isinstance(attempt.answer, HelloOk):
            return None
        return self._sessions.get(attempt.answer.session)

    def _forget_old_attempts(self) -> None:
        """Keep those with a session, and the newest of the others: thousands came after the one that goes."""
        while len(self._attempts) > 2 * limits.SESSIONS:
            oldest = next(name for name, known in self._attempts.items() if self._session_of(known) is None)
            del self._attempts[oldest]

    def _on_answer(self, event: Answer, now_ms: int) -> list[Any]:
        answered = (name for name, known in reversed(self._attempts.items()) if known.route == event.route)
        name = next(answered, None)
        if name is None:
            return []
        attempt = replace(self._attempts[name], answer=event.message)
        self._attempts[name] = attempt
        if isinstance(event.message, HelloOk):
            identity = event.message.session
            self._sessions[identity] = Session(identity, attempt.role, event.route, now_ms)
        return [SendFrame(event.route, None, 0, event.message)]

    def _on_post(self, event: Post, now_ms: int) -> list[Any]:
        session = self._sessions.get(event.session)
        return [] if session is None else [session.frame(event.message)]

    def _on_end(self, event: EndSession, now_ms: int) -> list[Any]:
        session = self._sessions.get(event.session)
        return [] if session is None else self._end(session, event.reason)

    def _on_route_lost(self, event: RouteLost, now_ms: int) -> list[Any]:
        lost = [session for session in self._sessions.values() if session.route == event.route]
        return [effect for session in lost for effect in self._finish(session, "its socket is gone")]

    def _on_tick(self, event: Tick, now_ms: int) -> list[Any]:
        oldest = now_ms - self._times.lease_ms
        silent = [session for session in self._sessions.values() if session.heard_ms <= oldest]
        return [effect for session in silent for effect in self._end(session, "lease expired")]

    def _end(self, session: Session, reason: str) -> list[Any]:
        bye = session.frame(Bye(reason[: limits.DETAIL_CHARACTERS]))
        return [bye, *self._finish(session, reason)]

    def _finish(self, session: Session, cause: str) -> list[Any]:
        del self._sessions[session.identity]
        return [SessionEnded(session.identity, session.role, cause)]
