"""Messages to frames and back.

Decides what bytes are a valid message; called by the control port of every node and client. Three frames:
the protocol tag, a header map, a body map (msgpack). The tag is compared before anything is decoded, lengths
are limited before msgpack allocates, types are looked up in a closed registry and every field is validated
strictly. Only `PeerProtocolError` may come out of `decode`, whatever the bytes. Grammar: docs/protocol.md.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, NoReturn

import msgpack

from common import limits
from common.errors import ErrorCode, PeerProtocolError
from common.messages import MESSAGE_TYPES, UNNUMBERED
from transport.strict_types import WrongValue, reader_of

PROTOCOL_TAG = b"TANDEM/1"
HEADER_BYTES = 256
_SOME_TAG = re.compile(rb"[A-Z]{1,16}/[0-9]{1,8}")


@dataclass(frozen=True, slots=True)
class Header:
    """Routing data of one message; sequence 0 marks the unnumbered ones."""

    session: str | None
    sequence: int


_TYPE_NUMBERS = {cls: number for number, cls in MESSAGE_TYPES.items()}
_READERS = {cls: reader_of(cls) for cls in MESSAGE_TYPES.values()}
_HEADER_FIELDS = {"type", "session", "sequence"}


@cache
def _field_names(cls: type) -> tuple[str, ...]:
    if not is_dataclass(cls):
        raise TypeError(f"{cls.__name__} cannot travel (integers: up to 64 bits)")
    return tuple(item.name for item in fields(cls))


def _as_map(value: Any) -> dict[str, Any]:
    """A message or a part of one as msgpack takes it. Raises TypeError for anything else."""
    return {name: getattr(value, name) for name in _field_names(type(value))}


def encode(header: Header, message: Any) -> list[bytes]:
    """Frames of a message. Raises KeyError for a type that is not in the registry: our bug."""
    head = {"type": _TYPE_NUMBERS[type(message)], "session": header.session, "sequence": header.sequence}
    return [
        PROTOCOL_TAG,
        msgpack.packb(head),
        msgpack.packb(_as_map(message), default=_as_map),
    ]


def decode(frames: list[bytes]) -> tuple[Header, Any]:
    """Header and message of frames from a peer. Raises `PeerProtocolError` for anything else."""
    if not frames or frames[0] != PROTOCOL_TAG:
        raise PeerProtocolError(
            ErrorCode.VERSION_MISMATCH,
            f"expected protocol {PROTOCOL_TAG.decode()}, got {_shown(frames[0]) if frames else 'nothing'}",
        )
    if len(frames) != 3:
        raise PeerProtocolError(ErrorCode.BAD_MESSAGE, f"expected 3 frames, got {len(frames)}")
    if len(frames[1]) > HEADER_BYTES or len(frames[2]) > limits.CONTROL_MESSAGE_BYTES:
        raise PeerProtocolError(ErrorCode.BAD_MESSAGE, "message too large")
    header, cls = _decode_header(_unpack(frames[1]))
    try:
        return header, _decode_body(cls, frames[2])
    except PeerProtocolError as error:
        error.place = (header.session, header.sequence)
        raise


def _shown(tag: bytes) -> str:
    """Another version as such; anything else may be data, and refusals are logged."""
    return tag.decode() if _SOME_TAG.fullmatch(tag) else f"{len(tag)} bytes of something else"


def _decode_body(cls: type, frame: bytes) -> Any:
    try:
        return _READERS[cls](_unpack(frame))
    except WrongValue as error:
        raise PeerProtocolError(ErrorCode.BAD_MESSAGE, f"{cls.__name__}{error}") from None


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError("extension types are not part of the protocol")


def _counted() -> Callable[[Any], Any]:
    """Ends the unpacking of a message with too many maps or arrays.

    Eight million empty ones fit in a frame, and would take seconds and half a gigabyte.
    """
    left = limits.MESSAGE_CONTAINERS

    def count(value: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError("too many maps and arrays")
        return value

    return count


def _unpack(frame: bytes) -> dict[str, Any]:
    # A shorter frame has no room for too many.
    count = _counted() if len(frame) > limits.MESSAGE_CONTAINERS else None
    try:
        value = msgpack.unpackb(
            frame,
            raw=False,
            use_list=False,
            strict_map_key=True,
            max_str_len=len(frame),
            max_bin_len=len(frame),
            max_array_len=limits.MESSAGE_ITEMS,
            max_map_len=limits.MESSAGE_MAP_ITEMS,
            max_ext_len=0,
            object_hook=count,
            list_hook=count,
            ext_hook=_refuse_extension,
        )
    # msgpack raises ValueError subclasses for malformed data, plus these two for odd nesting and keys.
    except (ValueError, TypeError, RecursionError) as error:
        raise PeerProtocolError(ErrorCode.BAD_MESSAGE, f"not valid msgpack: {type(error).__name__}") from None
    if not isinstance(value, dict):
        raise PeerProtocolError(ErrorCode.BAD_MESSAGE, "expected a map")
    return value


def _decode_header(head: dict[str, Any]) -> tuple[Header, type]:
    if head.keys() != _HEADER_FIELDS:
        raise PeerProtocolError(ErrorCode.BAD_MESSAGE, "header needs exactly type, session and sequence")
    number, session, sequence = head["type"], head["session"], head["sequence"]
    if type(number) is not int or number not in MESSAGE_TYPES:
        raise PeerProtocolError(ErrorCode.BAD_MESSAGE, "unknown message type")
    cls = MESSAGE_TYPES[number]
    numbered = cls not in UNNUMBERED
    if type(sequence) is not int or not 0 <= sequence < 2**63 or numbered != (sequence > 0):
        raise PeerProtocolError(ErrorCode.BAD_MESSAGE, "bad sequence number")
    if session is not None and (type(session) is not str or len(session) > 64):
        raise PeerProtocolError(ErrorCode.BAD_MESSAGE, "bad session id")
    if numbered and session is None:
        raise PeerProtocolError(ErrorCode.BAD_MESSAGE, f"{cls.__name__} needs a session")
    return Header(session, sequence), cls
