"""ZMTP, as far as a man in the middle needs it: where a message begins and ends in a stream of bytes.

Decides how bytes are cut into the greeting, commands and messages, and how frames become bytes again. Used by
`relay.py` alone. Only what libzmq says without encryption: 64 bytes of greeting, then frames of a flag byte,
a length of one or eight bytes, and a body. It must never lose a byte: what it cannot take apart it hands on.
"""

from dataclasses import dataclass

_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of a stream. frames: those of a whole message; None for anything else."""

    data: bytes
    frames: list[bytes] | None = None


class Splitter:
    """Cuts one direction of a connection."""

    def __init__(self) -> None:
        self._greeting_bytes = _GREETING_BYTES
        self._buffer = bytearray()
        self._frames: list[bytes] = []

    def feed(self, data: bytes) -> list[Piece]:
        """What is complete with this data."""
        pieces = []
        if self._greeting_bytes:
            pieces.append(Piece(data[: self._greeting_bytes]))
            data = data[self._greeting_bytes :]
            self._greeting_bytes -= len(pieces[0].data)
        self._buffer += data
        while (frame := self._next_frame()) is not None:
            flags, body, raw = frame
            if flags & _COMMAND:
                pieces.append(Piece(raw))
                continue
            self._frames.append(body)
            if not flags & _MORE:
                pieces.append(Piece(join(self._frames), self._frames))
                self._frames = []
        return pieces

    def _next_frame(self) -> tuple[int, bytes, bytes] | None:
        buffer = self._buffer
        if not buffer:
            return None
        start = 9 if buffer[0] & _LONG else 2
        if len(buffer) < start:
            return None
        end = start + int.from_bytes(buffer[1:start], "big")
        if len(buffer) < end:
            return None
        raw = bytes(buffer[:end])
        del buffer[:end]
        return raw[0], raw[start:], raw


def join(frames: list[bytes]) -> bytes:
    """Bytes of a message."""
    parts = []
    for index, frame in enumerate(frames):
        flags = _MORE if index + 1 < len(frames) else 0
        if len(frame) < 256:
            parts.append(bytes((flags, len(frame))) + frame)
        else:
            parts.append(bytes((flags | _LONG,)) + len(frame).to_bytes(8, "big") + frame)
    return b"".join(parts)
