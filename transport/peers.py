"""Sessions: the vocabulary and the rules that both sides share.

Decides what a session is: numbered messages in order, signs of life, one end. `transport.listener` (the
binding side, many peers behind one ROUTER) and `transport.connector` (the connecting side, one peer, a new
DEALER for each attempt) are pure objects with one door, `step(event, now_ms) -> effects`. They run unchanged
in the daemons and in simulation; they must never touch a socket, a clock or a random source. Rules:
docs/protocol.md, "Sessions".

A sequence number is drawn when a message leaves here. The control port behind it is one FIFO per peer, never
withdraws or overtakes, and ends the session when it cannot go on; so the number on the wire is the number of
the send.
"""

from dataclasses import dataclass
from typing import Any

from common.errors import ErrorCode
from common.messages import Hello, HelloOk, HelloRefused, Role


@dataclass(frozen=True, slots=True)
class LivenessTimes:
    """The flags of the same names, in milliseconds; the last three are not flags."""

    ping_ms: int
    suspect_ms: int
    dead_after_ms: int
    lease_ms: int
    hello_timeout_ms: int = 1_000
    backoff_min_ms: int = 50
    backoff_max_ms: int = 1_000


@dataclass(frozen=True, slots=True)
class FrameReceived:
    """A valid message from the wire. `route` names the peer (Listener) or the attempt (Connector)."""

    route: bytes
    session: str | None
    sequence: int
    message: Any


@dataclass(frozen=True, slots=True)
class BadFrame:
    """Something from the wire that is no valid message. Session and sequence: its header's, if that is."""

    route: bytes
    session: str | None
    sequence: int
    code: ErrorCode
    detail: str


@dataclass(frozen=True, slots=True)
class RouteLost:
    """Nothing can be sent on this route any more. refusal: what the peer meant by it, if it let us know."""

    route: bytes
    refusal: HelloRefused | None = None


@dataclass(frozen=True, slots=True)
class Post:
    """The node wants `message` sent in a session; dropped when the session has ended."""

    session: str
    message: Any


@dataclass(frozen=True, slots=True)
class Answer:
    """The node's answer to a HELLO of this route: HELLO_OK or HELLO_REFUSED."""

    route: bytes
    message: HelloOk | HelloRefused


@dataclass(frozen=True, slots=True)
class EndSession:
    """The node ends a session; a BYE with the reason goes out first."""

    session: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class StopConnecting:
    """The node is going away: end the session, if any, and make no further attempt."""

    reason: str


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Put one message on the wire."""

    route: bytes
    session: str | None
    sequence: int
    message: Any


@dataclass(frozen=True, slots=True)
class HelloArrived:
    """A HELLO that the node must answer with `Answer`."""

    route: bytes
    hello: Hello


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """The connecting side has a session."""

    hello_ok: HelloOk


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The session is over, once and for ever. `cause` is for people and logs."""

    session: str
    role: Role
    cause: str


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message of a live session, in order."""

    session: str
    message: Any


@dataclass(frozen=True, slots=True)
class Mistake:
    """A client sent something invalid in its session; the session goes on."""

    session: str
    code: ErrorCode
    detail: str


@dataclass(frozen=True, slots=True)
class Suspected:
    """The peer has been silent for `suspect_ms`, or (`silent` False) has spoken again."""

    session: str
    silent: bool


@dataclass(frozen=True, slots=True)
class OpenSocket:
    """Open a new socket to the peer, named `route`, for one attempt."""

    route: bytes


@dataclass(frozen=True, slots=True)
class CloseSocket:
    """Close that attempt's socket; what it still held is lost."""

    route: bytes


@dataclass(frozen=True, slots=True)
class AttemptRefused:
    """The peer answered HELLO_REFUSED."""

    refusal: HelloRefused


class Session:
    """Sequence numbers and signs of life of one open session, either side."""

    __slots__ = ("heard_ms", "identity", "received", "role", "route", "sent")

    def __init__(self, identity: str, role: Role, route: bytes, now_ms: int) -> None:
        self.identity = identity
        self.role = role
        self.route = route
        self.sent = 0
        self.received = 0
        self.heard_ms = now_ms

    def frame(self, message: Any) -> SendFrame:
        """Number a message for sending."""
        self.sent += 1
        return SendFrame(self.route, self.identity, self.sent, message)

    def accept(self, sequence: int, now_ms: int) -> bool:
        """Whether `sequence` is the next one; if so it counts as a sign of life."""
        if sequence != self.received + 1:
            return False
        self.received = sequence
        self.heard_ms = now_ms
        return True
