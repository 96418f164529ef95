"""A peer that says anything: frames on a DEALER, the way a broken or hostile client or decode node would.

Decides nothing. Used by the tests of bad input and of messages made by hand; what arrives is decoded with the
real codec. Waits are bounded by the poll of its socket.
"""

from typing import Any

import zmq

from common.ids import new_incarnation
from common.messages import Hello, HelloOk, HelloRefused, NodeProfile, Role, SessionGone
from transport.codec import Header, decode, encode

ANSWER_MS = 5_000
SILENCE_MS = 100


class RawPeer:
    """One DEALER. Use as a context manager. With a profile it says that it is a decode node."""

    def __init__(
        self, endpoint: str, profile: NodeProfile | None = None, incarnation: str | None = None
    ) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._profile = profile
        self._role = Role.CLIENT if profile is None else Role.DECODE
        self.incarnation = incarnation or new_incarnation()
        self._sequence = 0
        self.session = ""

    def __enter__(self) -> "RawPeer":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()

    def send_frames(self, *frames: bytes) -> None:
        self._socket.send_multipart(list(frames))

    def send(self, message: Any, session: str | None = None, sequence: int | None = None) -> None:
        """A message with the next sequence number of this peer's session, or with the given ones."""
        if sequence is None:
            self._sequence += 1
            sequence = self._sequence
        self.send_frames(*encode(Header(session or self.session, sequence), message))

    def next_header(self) -> Header:
        """The header of a message of this session, for a body that `encode` would not make."""
        self._sequence += 1
        return Header(self.session, self._sequence)

    def send_hello(self, attempt: int = 1) -> None:
        hello = Hello(self.incarnation, attempt, self._role, self._profile)
        self.send_frames(*encode(Header(None, 0), hello))

    def hello(self, attempt: int = 1) -> HelloOk:
        """Open a session, or be told the present one again."""
        self.send_hello(attempt)
        while not isinstance(answer := self.receive(), HelloOk):
            assert isinstance(answer, HelloRefused | SessionGone), answer
        self.session = answer.session
        return answer

    def receive(self) -> Any:
        """The next message; fails when none comes."""
        assert self._socket.poll(ANSWER_MS), "no answer"
        return decode(self._socket.recv_multipart())[1]

    def receive_until(self, kind: type) -> Any:
        """The next message of this kind; what comes before it is passed over."""
        while not isinstance(message := self.receive(), kind):
            continue
        return message

    def silent(self) -> bool:
        """Whether nothing arrives for a moment."""
        return not self._socket.poll(SILENCE_MS)
