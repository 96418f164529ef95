"""Messages to frames and back.

Decides what bytes are a valid message; called by the control port of every node and client. Three frames:
the protocol tag, a header map, a body map (msgpack). The tag is compared before anything is decoded, lengths
are limited before msgpack allocates, types are looked up in a closed registry and every field is validated
strictly. Only `PeerProtocolError` may come out of `decode`, whatever the bytes. Grammar: docs/protocol.md.
"""

from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any, get_args, get_type_hints

import msgpack
from pydantic import TypeAdapter, ValidationError

from common import limits
from common.errors import ErrorCode, PeerProtocolError
from common.messages import MESSAGE_TYPES, UNNUMBERED

PROTOCOL_TAG = b"TANDEM/1"
HEADER_BYTES = 256


@dataclass(frozen=True, slots=True)
class Header:
    """Routing data of one message; sequence 0 marks the unnumbered ones."""

    session: str | None
    sequence: int


_TYPE_NUMBERS = {cls: number for number, cls in MESSAGE_TYPES.items()}
_ADAPTERS: dict[type, TypeAdapter] = {cls: TypeAdapter(cls) for cls in MESSAGE_TYPES.values()}


def _revived_fields(cls: type) -> dict[str, type]:
    """Fields that msgpack carries as a plain map, string or array, with the class to make of each item."""
    revived = {}
    for name, hint in get_type_hints(cls).items():
        for part in (hint, *get_args(hint)):
            if isinstance(part, type) and (is_dataclass(part) or issubclass(part, StrEnum)):
                revived[name] = part
    return revived


_REVIVED: dict[type, dict[str, type]] = {cls: _revived_fields(cls) for cls in MESSAGE_TYPES.values()}


def _as_map(value: Any) -> dict[str, Any]:
    if not is_dataclass(value):
        raise TypeError(f"{type(value).__name__} cannot travel")
    return {item.name: getattr(value, item.name) for item in fields(value)}


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
        theirs = bytes(frames[0][:32]) if frames else b""
        raise PeerProtocolError(
            ErrorCode.VERSION_MISMATCH, f"expected protocol {PROTOCOL_TAG!r}, got {theirs!r}"
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


def _decode_body(cls: type, frame: bytes) -> Any:
    built = _build(cls, _unpack(frame))
    try:
        return _ADAPTERS[cls].validate_python(built)
    except ValidationError as error:
        raise PeerProtocolError(ErrorCode.BAD_MESSAGE, _describe(cls, error)) from None


def _unpack(frame: bytes) -> dict[str, Any]:
    try:
        value = msgpack.unpackb(
            frame,
            raw=False,
            use_list=False,
            strict_map_key=True,
            max_ext_len=0,
        )
    # msgpack raises ValueError subclasses for malformed data, plus these two for odd nesting and keys.
    except (ValueError, TypeError, RecursionError) as error:
        raise PeerProtocolError(ErrorCode.BAD_MESSAGE, f"not valid msgpack: {type(error).__name__}") from None
    if not isinstance(value, dict):
        raise PeerProtocolError(ErrorCode.BAD_MESSAGE, "expected a map")
    return value


def _decode_header(head: dict[str, Any]) -> tuple[Header, type]:
    if set(head) != {"type", "session", "sequence"}:
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


def _build(cls: type, body: dict[str, Any]) -> Any:
    """An unchecked instance of `cls`, nested parts included; the caller validates it."""
    body = dict(body)
    for name, part in _REVIVED.get(cls, {}).items():
        if name in body:
            body[name] = _revive(part, body[name], f"{cls.__name__}.{name}")
    try:
        return cls(**body)
    except TypeError:
        names = {item.name for item in fields(cls)}
        odd = sorted(str(name) for name in set(body) - names)
        problem = f"unknown field {odd[0][:64]}" if odd else "a field is missing"
        raise PeerProtocolError(ErrorCode.BAD_MESSAGE, f"{cls.__name__}: {problem}") from None


def _revive(part: type, value: Any, place: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_revive(part, item, place) for item in value)
    if is_dataclass(part) and isinstance(value, dict):
        return _build(part, value)
    if not is_dataclass(part) and isinstance(value, str):
        try:
            return part(value)
        except ValueError:
            raise PeerProtocolError(ErrorCode.BAD_MESSAGE, f"{place}: unknown value") from None
    return value


def _describe(cls: type, error: ValidationError) -> str:
    """First problem of a body, without the offending value: it may be prompt text."""
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{cls.__name__}.{place}: {first['msg']}"[: limits.DETAIL_CHARACTERS]
