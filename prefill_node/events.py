"""What the prefill core is told and what it asks for.

Decides nothing: frozen values between the core, the session layer and the compute thread. Events are in the
past tense, effects are verbs. Bytes of KV never appear here, only (slot, epoch).
"""

from dataclasses import dataclass
from typing import Any

from common.errors import ErrorCode
from common.messages import Hello, HelloOk, HelloRefused, Role, TcpPlane


@dataclass(frozen=True, slots=True)
class HelloReceived:
    """A peer wants a session."""

    route: bytes
    hello: Hello


@dataclass(frozen=True, slots=True)
class SessionLost:
    """A session has ended, for whatever cause."""

    session: str
    role: Role
    cause: str


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A message of a live session."""

    session: str
    message: Any


@dataclass(frozen=True, slots=True)
class ClientMistake:
    """A client's session sent something that is not a valid message."""

    session: str
    detail: str


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """Compute has finished one chunk of (slot, epoch). The last one carries logits and their digest."""

    slot: int
    epoch: int
    end: int
    digest: bytes
    busy_us: int
    logits: bytes | None = None
    logits_digest: bytes | None = None
    convert_us: int = 0


@dataclass(frozen=True, slots=True)
class ComputeFailed:
    """Compute gave up in a chunk of (slot, epoch); it no longer touches the slot."""

    slot: int
    epoch: int
    detail: str
    code: ErrorCode = ErrorCode.PREFILL_ERROR


@dataclass(frozen=True, slots=True)
class PlanePrepared:
    """Answer to PreparePlane. bulk: where KV will be sent from; None: the memory is shared.

    problem: why neither can be had, for the decode node's operator.
    """

    session: str
    route: bytes
    bulk: TcpPlane | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class BulkReleased:
    """Nothing that was sent in an ended session reads the slab any more."""

    session: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The operator wants the node to drain and exit."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """A deadline of the core may have come."""


@dataclass(frozen=True, slots=True)
class AnswerHello:
    """Accept or refuse the peer of this route."""

    route: bytes
    message: HelloOk | HelloRefused


@dataclass(frozen=True, slots=True)
class PreparePlane:
    """Find out how KV gets to a decode node, and be ready for it; answered by PlanePrepared at once.

    memory_probe: what to look for in shared memory; None: do not look, open a socket.
    """

    session: str
    route: bytes
    memory_probe: str | None


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message in a session."""

    session: str
    message: Any


@dataclass(frozen=True, slots=True)
class CloseSession:
    """End a session, with a reason for the peer."""

    session: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunChunk:
    """Compute positions `[start, end)` of a prompt into (slot, epoch); answered by exactly one event.

    prompt_digest: of the whole prompt, as the decode node named it. before, digests: bounds and digests of
    the chunks before, which the last chunk's logits depend on. Positions before `cached_tokens` are not
    computed: with the first chunk they are copied from `places` of the prefix cache.
    """

    job_id: str
    slot: int
    epoch: int
    prompt: bytes
    prompt_digest: str
    start: int
    end: int
    before: tuple[tuple[int, int], ...]
    digests: tuple[bytes, ...]
    cached_tokens: int = 0
    places: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixCorrupt:
    """A place of the prefix cache does not hold what was put there; nothing was computed."""

    slot: int
    epoch: int
    place: int


@dataclass(frozen=True, slots=True)
class ExitNode:
    """Leave with this status; nothing is left to do."""

    status: int
    reason: str
