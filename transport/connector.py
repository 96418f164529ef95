"""The connecting side's session, or its attempts at one.

Decides when to open a socket, when an attempt has failed, when the peer counts as dead, and when to try
again. Stepped by the decode node's stack and by clients; pure, see `transport.peers`. One attempt is one
socket and one HELLO; no socket is used for a second session.
"""

from typing import Any

from common import limits
from common.data_planes import SHM
from common.errors import ErrorCode
from common.messages import Bye, Hello, HelloOk, HelloRefused, NodeProfile, Ping, Role, SessionGone
from transport.peers import (
    AttemptRefused,
    BadFrame,
    CloseSocket,
    Delivered,
    EndSession,
    FrameReceived,
    LivenessTimes,
    OpenSocket,
    Post,
    RouteLost,
    SendFrame,
    Session,
    SessionEnded,
    SessionOpened,
    StopConnecting,
    Suspected,
    Tick,
)


class Connector:
    """The one session, or the attempt at one, of a connecting node."""

    def __init__(
        self,
        times: LivenessTimes,
        incarnation: str,
        role: Role,
        profile: NodeProfile | None = None,
        planes: tuple[str, ...] = (SHM,),
        memory_probe: str | None = None,
    ) -> None:
        """The last four are for HELLO, which says what they are."""
        self._times = times
        self._incarnation = incarnation
        self._role = role
        self._profile = profile
        self._planes = planes
        self._memory_probe = memory_probe
        self._attempt = 0
        self._backoff_ms = times.backoff_min_ms
        self._next_attempt_ms: int | None = 0
        self._hello_deadline_ms: int | None = None
        self._session: Session | None = None
        self._pinged_ms = 0
        self._stopped = False
        self._suspected = False
        self.stale_messages = 0
        self._handlers = {
            FrameReceived: self._on_frame,
            BadFrame: self._on_bad_frame,
            RouteLost: self._on_route_lost,
            Post: self._on_post,
            EndSession: self._on_end,
            StopConnecting: self._on_stop,
            Tick: self._on_tick,
        }

    def step(self, event: Any, now_ms: int) -> list[Any]:
        """The only door. Effects: OpenSocket, CloseSocket, SendFrame, SessionOpened, SessionEnded, Delivered,
        Suspected, AttemptRefused."""
        return self._handlers[type(event)](event, now_ms)

    def deadline_ms(self) -> int | None:
        """When `step(Tick)` is due at the latest."""
        if self._session is not None:
            patience_ms = self._times.dead_after_ms if self._suspected else self._times.suspect_ms
            return min(self._pinged_ms + self._times.ping_ms, self._session.heard_ms + patience_ms)
        if self._hello_deadline_ms is not None:
            return self._hello_deadline_ms
        return self._next_attempt_ms

    @property
    def _route(self) -> bytes:
        return b"attempt-%d" % self._attempt

    def _on_frame(self, event: FrameReceived, now_ms: int) -> list[Any]:
        message, session = event.message, self._session
        if event.route != self._route:
            self.stale_messages += 1
            return []
        if session is None:
            return self._on_hello_answer(message, now_ms)
        if isinstance(message, (HelloOk, HelloRefused)):
            return []  # a repeated answer to the HELLO of this very socket
        if isinstance(message, SessionGone):
            if message.session != session.identity:
                self.stale_messages += 1
                return []
            return self._finish("the peer no longer knows the session", now_ms)
        if event.session != session.identity:
            self.stale_messages += 1
            return []
        if not session.accept(event.sequence, now_ms):
            reason = f"{ErrorCode.SEQUENCE_ERROR}: expected {session.received + 1}, got {event.sequence}"
            return self._end(reason, now_ms)
        if isinstance(message, Bye):
            return self._finish(f"bye: {message.reason}", now_ms)
        effects: list[Any] = [Suspected(session.identity, False)] if self._suspected else []
        self._suspected = False
        # Only a session that works proves the peer well: one that always ends at once must not be hammered.
        self._backoff_ms = self._times.backoff_min_ms
        return [*effects, Delivered(session.identity, message)]

    def _on_hello_answer(self, message: Any, now_ms: int) -> list[Any]:
        if self._hello_deadline_ms is None or not isinstance(message, (HelloOk, HelloRefused)):
            self.stale_messages += 1
            return []
        if isinstance(message, HelloRefused):
            return [*self._give_up_attempt(now_ms), AttemptRefused(message)]
        self._hello_deadline_ms = None
        self._session = Session(message.session, self._role, self._route, now_ms)
        self._pinged_ms = now_ms
        return [SessionOpened(message)]

    def _on_bad_frame(self, event: BadFrame, now_ms: int) -> list[Any]:
        if event.route != self._route:
            return []
        if self._session is not None:
            return self._end(f"{ErrorCode.PROTOCOL_ERROR}: {event.detail}", now_ms)
        if event.code is not ErrorCode.VERSION_MISMATCH or self._hello_deadline_ms is None:
            return []
        refusal = HelloRefused(False, event.detail, ("version",))
        return [*self._give_up_attempt(now_ms), AttemptRefused(refusal)]

    def _on_post(self, event: Post, now_ms: int) -> list[Any]:
        if self._session is None or self._session.identity != event.session:
            return []
        return [self._session.frame(event.message)]

    def _on_end(self, event: EndSession, now_ms: int) -> list[Any]:
        if self._session is None or self._session.identity != event.session:
            return []
        return self._end(event.reason, now_ms)

    def _on_route_lost(self, event: RouteLost, now_ms: int) -> list[Any]:
        if event.route != self._route:
            return []
        if self._session is not None:
            return self._finish("its socket is gone", now_ms)
        if self._hello_deadline_ms is None:
            return []
        refused = [] if event.refusal is None else [AttemptRefused(event.refusal)]
        return [*self._give_up_attempt(now_ms), *refused]

    def _on_stop(self, event: StopConnecting, now_ms: int) -> list[Any]:
        self._stopped = True
        self._next_attempt_ms = None
        if self._session is not None:
            return self._end(event.reason, now_ms)
        return self._give_up_attempt(now_ms) if self._hello_deadline_ms is not None else []

    def _on_tick(self, event: Tick, now_ms: int) -> list[Any]:
        if self._session is not None:
            return self._watch(self._session, now_ms)
        if self._hello_deadline_ms is not None:
            return self._give_up_attempt(now_ms) if now_ms >= self._hello_deadline_ms else []
        if self._next_attempt_ms is not None and now_ms >= self._next_attempt_ms:
            return self._begin_attempt(now_ms)
        return []

    def _watch(self, session: Session, now_ms: int) -> list[Any]:
        """Look after an open session: end it, suspect the peer, ask for a sign of life."""
        silent_ms = now_ms - session.heard_ms
        if silent_ms >= self._times.dead_after_ms:
            return self._end(f"silent for {silent_ms} ms", now_ms)
        effects: list[Any] = []
        if silent_ms >= self._times.suspect_ms and not self._suspected:
            self._suspected = True
            effects.append(Suspected(session.identity, True))
        if now_ms - self._pinged_ms >= self._times.ping_ms:
            self._pinged_ms = now_ms
            effects.append(session.frame(Ping()))
        return effects

    def _begin_attempt(self, now_ms: int) -> list[Any]:
        self._attempt += 1
        self._next_attempt_ms = None
        self._hello_deadline_ms = now_ms + self._times.hello_timeout_ms
        hello = Hello(
            self._incarnation, self._attempt, self._role, self._profile, self._planes, self._memory_probe
        )
        return [OpenSocket(self._route), SendFrame(self._route, None, 0, hello)]

    def _give_up_attempt(self, now_ms: int) -> list[Any]:
        self._hello_deadline_ms = None
        self._back_off(now_ms)
        return [CloseSocket(self._route)]

    def _back_off(self, now_ms: int) -> None:
        self._next_attempt_ms = None if self._stopped else now_ms + self._backoff_ms
        self._backoff_ms = min(2 * self._backoff_ms, self._times.backoff_max_ms)

    def _end(self, reason: str, now_ms: int) -> list[Any]:
        bye = self._session.frame(Bye(reason[: limits.DETAIL_CHARACTERS]))
        return [bye, *self._finish(reason, now_ms)]

    def _finish(self, cause: str, now_ms: int) -> list[Any]:
        session, self._session = self._session, None
        self._suspected = False
        self._back_off(now_ms)
        return [CloseSocket(self._route), SessionEnded(session.identity, session.role, cause)]
