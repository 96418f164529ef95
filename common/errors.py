"""Every error of Tandem: the exception tree and the codes that travel.

Four kinds never mix. Our bug raises `InvariantViolation` and ends the process. The peer's fault raises
`PeerProtocolError`, is caught in the loop only, and ends the session. The operator's mistake raises
`ConfigError` or `HandshakeRefused` and becomes one readable line and an exit status. What is expected (no
capacity, timeout, dead peer) is a value: an `ErrorCode` inside an event or a message.
"""

from enum import IntEnum, StrEnum


class TandemError(Exception):
    """Root of everything that Tandem raises on purpose."""


class ConfigError(TandemError):
    """The operator asked for something that cannot be; exit status 2."""


class HandshakeRefused(TandemError):
    """The other node is not compatible with this one; exit status 3 before the first session."""


class NodeUnavailable(TandemError):
    """A client cannot reach the node that it wants to talk to, or has lost it."""


class PeerProtocolError(TandemError):
    """The peer broke the protocol. Raised by the codec and the session layer, caught in the loop."""

    def __init__(self, code: "ErrorCode", detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
        # Of a message whose header was good: (session, sequence), so that its place in the row is known.
        self.place: tuple[str | None, int] = (None, 0)


class InvariantViolation(TandemError):
    """Tandem itself is wrong; the process must not carry on. Exit status 4."""


class ExitStatus(IntEnum):
    """Exit statuses of both daemons; `docs/operations.md` lists them."""

    OK = 0
    DRAIN_INCOMPLETE = 1
    CONFIG = 2
    REFUSED = 3
    INVARIANT = 4
    HUNG = 5
    ABORTED = 6


class ErrorCode(StrEnum):
    """What went wrong, as it travels in messages and logs; see `definite` and `advice`."""

    INVALID_REQUEST = "INVALID_REQUEST"
    EMPTY_PROMPT = "EMPTY_PROMPT"
    TOKEN_OUT_OF_RANGE = "TOKEN_OUT_OF_RANGE"
    CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
    INVALID_SAMPLING = "INVALID_SAMPLING"
    DUPLICATE_ID = "DUPLICATE_ID"
    BUSY = "BUSY"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    NO_PREFILL_NODE = "NO_PREFILL_NODE"
    DRAINING = "DRAINING"
    CANCELLED = "CANCELLED"
    PREFILL_ERROR = "PREFILL_ERROR"
    PREFILL_TIMEOUT = "PREFILL_TIMEOUT"
    PEER_LOST = "PEER_LOST"
    JOB_TIMEOUT = "JOB_TIMEOUT"
    KV_CORRUPT = "KV_CORRUPT"
    KV_STALE = "KV_STALE"
    ENGINE_ERROR = "ENGINE_ERROR"
    ENGINE_HUNG = "ENGINE_HUNG"
    DRAIN_TIMEOUT = "DRAIN_TIMEOUT"
    BAD_MESSAGE = "BAD_MESSAGE"
    PROTOCOL_ERROR = "PROTOCOL_ERROR"
    SEQUENCE_ERROR = "SEQUENCE_ERROR"
    VERSION_MISMATCH = "VERSION_MISMATCH"
    CLIENT_GONE = "CLIENT_GONE"

    @property
    def definite(self) -> bool:
        """True when the work has not happened and never will: no token was yielded, retry is safe."""
        return self in _DEFINITE

    @property
    def advice(self) -> str:
        """What the person or program that meets this code can do about it."""
        return _ADVICE[self]


_DEFINITE = frozenset(
    {
        ErrorCode.INVALID_REQUEST,
        ErrorCode.EMPTY_PROMPT,
        ErrorCode.TOKEN_OUT_OF_RANGE,
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        ErrorCode.INVALID_SAMPLING,
        ErrorCode.DUPLICATE_ID,
        ErrorCode.BUSY,
        ErrorCode.SHUTTING_DOWN,
        ErrorCode.NO_PREFILL_NODE,
        ErrorCode.DRAINING,
        ErrorCode.BAD_MESSAGE,
        ErrorCode.VERSION_MISMATCH,
    }
)

_ADVICE = {
    ErrorCode.INVALID_REQUEST: "correct the request",
    ErrorCode.EMPTY_PROMPT: "send at least one token",
    ErrorCode.TOKEN_OUT_OF_RANGE: "use token ids of the served model",
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: "shorten prompt or answer, or raise --max-tokens on both nodes",
    ErrorCode.INVALID_SAMPLING: "correct the sampling field",
    ErrorCode.DUPLICATE_ID: "use a label that none of your live jobs has",
    ErrorCode.BUSY: "retry after the hinted delay",
    ErrorCode.SHUTTING_DOWN: "send the job to another decode node, or again after the restart",
    ErrorCode.NO_PREFILL_NODE: "start the prefill node, or check --pd-prefill-worker",
    ErrorCode.DRAINING: "send the job to another node",
    ErrorCode.CANCELLED: "nothing: the job was cancelled",
    ErrorCode.PREFILL_ERROR: "look at the prefill node's log; retry",
    ErrorCode.PREFILL_TIMEOUT: "retry, or raise --prefill-timeout-ms",
    ErrorCode.JOB_TIMEOUT: "retry when the node is less busy, or raise --job-timeout-ms",
    ErrorCode.PEER_LOST: "retry once a prefill node is back",
    ErrorCode.KV_CORRUPT: "retry; if it happens again, suspect memory or the link",
    ErrorCode.KV_STALE: "retry",
    ErrorCode.ENGINE_ERROR: "look at the decode node's log; retry",
    ErrorCode.ENGINE_HUNG: "retry after the supervisor restarted the node",
    ErrorCode.DRAIN_TIMEOUT: "retry on another node; raise --drain-ms",
    ErrorCode.BAD_MESSAGE: "correct the message",
    ErrorCode.PROTOCOL_ERROR: "use matching versions of Tandem on both sides",
    ErrorCode.SEQUENCE_ERROR: "nothing: a new session follows",
    ErrorCode.VERSION_MISMATCH: "install the same version of Tandem on both sides",
    ErrorCode.CLIENT_GONE: "nothing: the client left",
}


def check(condition: bool, message: str) -> None:
    """Raise `InvariantViolation(message)` unless `condition` holds; unlike `assert`, also under -O."""
    if not condition:
        raise InvariantViolation(message)
