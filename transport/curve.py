"""Who may connect: the answer to ZeroMQ's question, asked at every handshake with a node that has keys.

Decides which client keys are let in, and what a refused handshake means to the one that was refused. `decide`
is the whole of the answer, bytes in and bytes out: one request of the authentication protocol ZAP 1.0 (RFC
27). `Gate` moves its frames and counts; the link serves it from the loop thread, because one thread owns
every socket. An unreadable list, or a request that is not understood, must never let anybody in.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from common import limits
from common.errors import ConfigError
from common.log import NodeLog
from common.log_events import LogEvent
from common.messages import StatusReply
from transport.key_files import AllowedKeys
from transport.peers import SendFrame
from transport.zmq_sockets import KEY_DOMAIN

VERSION = b"1.0"
_FIELD_BYTES = 255
_KEY_BYTES = 32
_MECHANISMS_DIFFER = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH

Frames = list[bytes]
OnDenied = Callable[["Denial"], None]


@dataclass(frozen=True, slots=True)
class Denial:
    """Somebody was not let in. address: as far as known. key: the public key that was offered, if one was."""

    address: str
    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a handshake of ours failed. temporary: it may be another fault that passes by itself."""

    temporary: bool
    detail: str


def decide(frames: Frames, names: Mapping[bytes, str]) -> tuple[Frames, Denial | None]:
    """The reply to one request, and the denial if it is one.

    frames: version, request id, domain, address, identity, mechanism, credentials. names: by allowed key.
    """
    request_id = frames[1] if len(frames) > 1 and len(frames[1]) <= _FIELD_BYTES else b""
    well_formed = len(frames) == 7 and frames[0] == VERSION and max(map(len, frames)) <= _FIELD_BYTES
    if not well_formed or frames[2] != KEY_DOMAIN:
        return _reply(request_id, b"500", b"not understood"), Denial("unknown", "", "malformed request")
    address = frames[3].decode("ascii", "replace") or "local"
    mechanism, key = frames[5:]
    if mechanism != b"CURVE" or len(key) != _KEY_BYTES:
        return _reply(request_id, b"400", b"CURVE only"), Denial(address, "", "it does not use CURVE")
    name = names.get(key)
    if name is None:
        return _reply(request_id, b"400", b"not listed"), Denial(
            address, z85.encode(key).decode(), "its key is not listed"
        )
    return _reply(request_id, b"200", b"OK", name.encode()[:_FIELD_BYTES]), None


def _reply(request_id: bytes, status: bytes, text: bytes, user: bytes = b"") -> Frames:
    return [VERSION, request_id, status, text, user, b""]


class Gate:
    """Answers the handshakes of one context, and counts those that fail. Used by a link, on its thread."""

    def __init__(self, requests: zmq.Socket, allowed: AllowedKeys, on_denied: OnDenied) -> None:
        """requests: the REP that is asked, bound before the ROUTER; owned from now on."""
        self.denied = 0
        self.requests = requests
        self._allowed = allowed
        self._on_denied = on_denied

    def serve(self) -> None:
        """Answer what is waiting, at most one batch; never blocks."""
        for _ in range(limits.RECEIVE_BATCH_MESSAGES):
            try:
                frames = self.requests.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            reply, denial = self._answer(frames)
            self.requests.send_multipart(reply, zmq.NOBLOCK)
            if denial is not None:
                self._deny(denial)

    def count_failures(self, monitor: zmq.Socket) -> None:
        """Take in what the ROUTER tells of handshakes that never came to a question, at most one batch."""
        for _ in range(limits.RECEIVE_BATCH_MESSAGES):
            if not monitor.poll(0):
                return
            event = recv_monitor_message(monitor)
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                reason = "it left during the handshake"  # as one without keys does, if it finds out first
            elif event["value"] == _MECHANISMS_DIFFER:
                reason = "it has no keys"
            else:
                reason = "it does not know this node's public key"
            self._deny(Denial("unknown", "", reason))

    def _answer(self, frames: Frames) -> tuple[Frames, Denial | None]:
        try:
            return decide(frames, self._allowed.names())
        except ConfigError as error:
            reply, denial = decide(frames, {})
            return reply, None if denial is None else Denial(denial.address, denial.key, str(error))

    def _deny(self, denial: Denial) -> None:
        self.denied += 1
        self._on_denied(denial)


def refusal_of(event: int, value: int, keyed: bool) -> Refusal | None:
    """What a monitor event of a connecting socket says about keys; None when it is about something else.

    keyed: whether this side has keys.
    """
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return Refusal(False, "that node does not list this key; allow it there with scripts/keys.py allow")
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MECHANISMS_DIFFER:
        asked, remedy = "has no keys", "leave --key-file and --server-key out, or give it keys"
        if not keyed:
            asked, remedy = "uses keys", "give --key-file and --server-key"
        return Refusal(False, f"that node {asked}: {remedy}")
    if event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
        # The other side may have found the fault first, and left without a word.
        hint = "does it use keys, and is --server-key its public key?"
        if not keyed:
            hint = "if it uses keys, give --key-file and --server-key"
        return Refusal(True, f"that node ended the handshake: {hint}")
    return None


def with_denials(frame: SendFrame, clients_denied: int) -> SendFrame:
    """The frame; if it is a STATUS answer, one that also says how many were not let in.

    The cores, which make these answers, know nothing of keys.
    """
    if not isinstance(frame.message, StatusReply):
        return frame
    body = {**frame.message.body, "clients_denied": clients_denied}
    return replace(frame, message=StatusReply(body))


def denial_logger(log: NodeLog) -> OnDenied:
    """What a node passes to its link, so that its log names who was not let in."""

    def write(denial: Denial) -> None:
        log.warning(LogEvent.CLIENT_DENIED, peer=denial.address, key=denial.key, reason=denial.reason)

    return write
