"""One message of every type, with every field set, and what tests of the protocol do with them."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import msgpack
import pytest
from annotated_types import Ge, Le, MaxLen

from common import client_messages as cm
from common import limits
from common import messages as ms
from common.errors import ErrorCode, PeerProtocolError
from transport.codec import Header, decode, encode

SESSION = "0123456789abcdef"
_JOB = "c0" * 16
_PROFILE = ms.NodeProfile("m/135M", "aa" * 16, "bb" * 16, 30, 3, 64, 49_152, "float32", "half", 768, 128)
_GRANTS = (ms.SlotGrant(0, 17), ms.SlotGrant(5, 0))
_PLANE = ms.ShmPlane("/tandem-0123456789abcdef012345", 6, 2**24)
_TIMINGS = cm.Timings(95, 40, {"queued": 5, "prefill": 30, "decode": 60}, 7, 29_000, 58_000, 900, 80, None)
_LOGPROB = cm.TokenLogprob(5, " é", -0.25, (cm.TopLogprob(5, " é", -0.25), cm.TopLogprob(9, "a", -2.5)))
_DIGESTS = (b"\x00" * 16, b"\xff" * 16)
_SAMPLING = {"temperature": 0.5, "stop": ("\n",), "seed": 7}

SAMPLES = [
    ms.Hello("fedcba9876543210", 3, ms.Role.DECODE, _PROFILE, ("shm", "tcp"), _PLANE.name),
    ms.HelloOk(SESSION, "0011223344556677", 5_000, 20_000, _PROFILE, _GRANTS, _PLANE, ms.TcpPlane(49_152)),
    ms.HelloRefused(True, "another decode node's lease still lives", ("dtype", "kv_heads")),
    ms.SessionGone(SESSION),
    ms.Ping(),
    ms.Pong(2**40, 129),
    ms.Bye("drained"),
    ms.Grant((ms.SlotGrant(1_023, limits.EPOCH),)),
    ms.Draining(),
    ms.GrantLimit(3),
    ms.ReturnSlots((4, 1_023)),
    ms.Prefill(_JOB, 2, 70_000, b"\x01\x00\x00\x00\xff\x7f\x00\x00", "dd" * 16, 0, 120_000),
    ms.PrefillDone(
        _JOB, 2, 70_000, "dd" * 16, 200, 128, 2**31, _DIGESTS, b"\x00\x00\x80\x3f", b"9" * 16, 11, 12
    ),
    ms.PrefillFailed(_JOB, 0, 1, ErrorCode.CANCELLED, "cancelled by the decode node"),
    ms.Cancel(1_023, 300),
    ms.Release(0, 2**32),
    ms.Hurry(1_023, 300),
    ms.BulkOpen(2**23),
    ms.Credit(2**20),
    ms.KvPiece(2, 70_000, 128, 256, 24, 6),
    ms.Submit("naïve 😀", None, None, (1, 128, 65_536), _SAMPLING),
    ms.CancelJob("naïve 😀"),
    ms.Accepted("a", _JOB, 3),
    ms.Rejected("a", ErrorCode.BUSY, "the queue is full", 250),
    ms.Tokens("a", (5, 49_151), " é", 1, (_LOGPROB, _LOGPROB)),
    ms.Finished("a", "stop", "remote", cm.Usage(3, 4), _TIMINGS, ("stop", "length")),
    ms.Failed("a", ErrorCode.PEER_LOST, "the prefill node died", False),
    ms.StatusRequest(),
    ms.StatusReply({"accepting": True, "lanes": (None, _JOB), "load": 0.25}),
    ms.ClientError(ErrorCode.BAD_MESSAGE, "expected 3 frames, got 2"),
    ms.CacheOrder("save", "chat-2.cache"),
    ms.CacheReply(12, 2**33, "/var/lib/tandem/chat-2.cache", ErrorCode.BUSY, "another one is going on"),
    ms.Tokenize("a", None, None, (1, 49_151, 2)),
    ms.Tokenized("a", (1, 2), "naïve 😀"),
]
SAMPLE_IDS = [type(sample).__name__ for sample in SAMPLES]
every_sample = pytest.mark.parametrize("sample", SAMPLES, ids=SAMPLE_IDS)


def sample_of(cls: type) -> Any:
    return next(sample for sample in SAMPLES if type(sample) is cls)


def header_of(cls: type) -> Header:
    return Header(None, 0) if cls in ms.UNNUMBERED else Header(SESSION, 9)


def frames_with(cls: type, body: Any) -> list[bytes]:
    """Good tag and header, and a body of the test's own making."""
    return [*encode(header_of(cls), sample_of(cls))[:2], msgpack.packb(body)]


def refusal(frames: list[bytes]) -> PeerProtocolError:
    """The error that `decode` must raise."""
    with pytest.raises(PeerProtocolError) as caught:
        decode(frames)
    return caught.value


def hints_of(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def bounds_of(hint: Any) -> tuple[int, int]:
    """Least and greatest value, or length, of an annotated hint."""
    known = {type(bound): bound for bound in hint.__metadata__}
    if get_args(hint)[0] is str:
        return 0, known[MaxLen].max_length
    return known[Ge].ge, known[Le].le


def as_plain(message: Any) -> Any:
    """A message as maps and arrays, made without the codec."""
    if is_dataclass(message):
        return {item.name: as_plain(getattr(message, item.name)) for item in fields(message)}
    if isinstance(message, tuple):
        return [as_plain(item) for item in message]
    return message


Path = tuple[str | int, ...]


def records(message: Any, path: Path = ()) -> Iterator[tuple[Path, type]]:
    """The way to the message itself and to every record inside it, and its type."""
    if is_dataclass(message):
        yield path, type(message)
        for item in fields(message):
            yield from records(getattr(message, item.name), (*path, item.name))
    elif isinstance(message, tuple):
        for position, item in enumerate(message):
            yield from records(item, (*path, position))


def changed(
    sample: Any, path: Path, name: str | bytes, value: Any = None, *, remove: bool = False
) -> list[bytes]:
    """Frames of the sample with one field of the record at `path` set or removed."""
    body = record = as_plain(sample)
    for step in path:
        record = record[step]
    if remove:
        del record[name]
    else:
        record[name] = value
    return frames_with(type(sample), body)
