"""What the codec must refuse, at every depth, cheaply, and without repeating what was sent."""

import math
import tracemalloc
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgpack
import pytest

from common import limits
from common import messages as ms
from common.clock import now_ms
from common.errors import ErrorCode, PeerProtocolError
from tests.protocol_samples import (
    SESSION,
    as_plain,
    bounds_of,
    changed,
    every_sample,
    frames_with,
    hints_of,
    records,
    refusal,
    sample_of,
)
from transport.codec import HEADER_BYTES, PROTOCOL_TAG, Header, decode, encode

SECRET = "what-only-the-client-may-know"
FAULT_COUNT = 300_000
FAULT_BOUND_MS = 2_000

WRONG_VALUES = [
    *(None, True, False, 0, 1, -1, 1.0, math.inf, math.nan, "", "stop", b"", b"x"),
    *([], [1], [True], ["x"], [None], {}, {"x": 1}, {"x": "y"}),
]


def fits(hint: Any, value: Any) -> bool:
    """Whether a plain value may stand in a field of this type; written apart from the codec."""
    arguments = get_args(hint)
    if hint is Any:
        return True
    if hint in (int, str, bytes, bool):
        return type(value) is hint
    if hint is float:
        return type(value) is float and math.isfinite(value)
    if is_dataclass(hint):
        return False  # none of the values is a whole record
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return value in list(hint)
    if get_origin(hint) is Annotated:
        low, high = bounds_of(hint)
        return type(value) is arguments[0] and low <= (value if arguments[0] is int else len(value)) <= high
    if get_origin(hint) in (Union, UnionType):
        return value is None or fits(arguments[0], value)
    if get_origin(hint) is tuple:
        return type(value) is list and all(fits(arguments[0], item) for item in value)
    return type(value) is dict and all(fits(arguments[1], item) for item in value.values())


@every_sample
def test_a_field_of_the_wrong_type_is_refused_at_every_depth(sample: Any) -> None:
    for path, cls in records(sample):
        for name, hint in hints_of(cls).items():
            for value in WRONG_VALUES:
                frames = changed(sample, path, name, value)
                if fits(hint, value):
                    decode(frames)
                else:
                    error = refusal(frames)
                    assert error.code is ErrorCode.BAD_MESSAGE
                    assert name in error.detail


@every_sample
def test_a_number_or_text_just_outside_its_bounds_is_refused(sample: Any) -> None:
    for path, cls in records(sample):
        for name, hint in hints_of(cls).items():
            inner = get_args(hint)[0] if get_origin(hint) in (Union, UnionType) else hint
            if get_origin(inner) is not Annotated:
                continue
            low, high = bounds_of(inner)
            integer = get_args(inner)[0] is int
            for value in (low, high) if integer else ("", "x" * high):
                decode(changed(sample, path, name, value))
            for value in (low - 1, high + 1) if integer else ("x" * (high + 1),):
                assert name in refusal(changed(sample, path, name, value)).detail


@every_sample
def test_a_missing_field_is_refused_at_every_depth_and_named(sample: Any) -> None:
    for path, cls in records(sample):
        for item in fields(cls):
            if item.default is MISSING and item.default_factory is MISSING:
                error = refusal(changed(sample, path, item.name, remove=True))
                assert f"field {item.name} is missing" in error.detail


@every_sample
def test_an_unknown_field_is_refused_at_every_depth(sample: Any) -> None:
    for path, _ in records(sample):
        for name in ("colour", "__class__", "self", "", "two words", b"label", "ß" * 40):
            assert "unknown field" in refusal(changed(sample, path, name, 1)).detail
        assert "colour" not in refusal(changed(sample, path, "colour", 1)).detail


@every_sample
def test_a_body_that_is_no_map_is_refused(sample: Any) -> None:
    for body in (None, 1, "text", [], [1], b"bytes", True):
        assert refusal(frames_with(type(sample), body)).code is ErrorCode.BAD_MESSAGE


@pytest.mark.parametrize(
    "head",
    [
        {"type": 99, "session": SESSION, "sequence": 1},
        {"type": True, "session": None, "sequence": 0},
        {"type": "5", "session": SESSION, "sequence": 1},
        {"type": [5], "session": SESSION, "sequence": 1},
        {"type": "Ping", "session": SESSION, "sequence": 1},
        {"type": 5, "session": SESSION, "sequence": 0},
        {"type": 5, "session": SESSION, "sequence": -1},
        {"type": 5, "session": SESSION, "sequence": True},
        {"type": 5, "session": SESSION, "sequence": 2**63},
        {"type": 5, "session": SESSION, "sequence": 1.0},
        {"type": 5, "session": None, "sequence": 1},
        {"type": 5, "session": b"0123", "sequence": 1},
        {"type": 5, "session": "x" * 65, "sequence": 1},
        {"type": 4, "session": None, "sequence": 1},
        {"type": 5, "session": SESSION},
        {"type": 5, "session": SESSION, "sequence": 1, "priority": 1},
        {},
        [5, SESSION, 1],
    ],
)
def test_a_header_that_is_not_exactly_right_is_refused(head: Any) -> None:
    error = refusal([PROTOCOL_TAG, msgpack.packb(head), msgpack.packb({})])
    assert error.code is ErrorCode.BAD_MESSAGE
    assert error.place == (None, 0)


def test_a_bad_body_behind_a_good_header_keeps_its_place_in_the_row() -> None:
    assert refusal(frames_with(ms.Cancel, {"slot": 0})).place == (SESSION, 9)


@pytest.mark.parametrize("tag", [b"", b"TANDEM/2", b"TANDEM/1 ", b"tandem/1", b"\x00" * 100_000])
def test_another_version_is_told_apart_before_anything_is_decoded(tag: bytes) -> None:
    error = refusal([tag, b"\xc1 not msgpack"])
    assert error.code is ErrorCode.VERSION_MISMATCH
    assert len(error.detail) < 300


@pytest.mark.parametrize("count", [0, 1, 2, 4, 1_000])
def test_another_number_of_frames_is_refused(count: int) -> None:
    frames = (encode(Header(SESSION, 1), ms.Ping()) + [b""] * 1_000)[:count]
    expected = ErrorCode.BAD_MESSAGE if count else ErrorCode.VERSION_MISMATCH
    assert refusal(frames).code is expected


def test_oversize_frames_are_refused_before_they_are_unpacked() -> None:
    tag, header, body = encode(Header(SESSION, 1), ms.Bye("x"))
    # Not msgpack: had it been unpacked, the text would say so.
    assert "too large" in refusal([tag, b"\xc1" * (HEADER_BYTES + 1), body]).detail
    assert "too large" in refusal([tag, header, b"\xc1" * (limits.CONTROL_MESSAGE_BYTES + 1)]).detail
    assert "too large" not in refusal([tag, b"\xc1" * HEADER_BYTES, body]).detail


@pytest.mark.parametrize(
    "value",
    [
        *(b"\xc7\x00\x05", b"\xc7\x00\xff", b"\xd4\x05\x00", b"\xd6\xff\x00\x00\x00\x00"),
        *(opening + b"\xff\xff\xff\xff" for opening in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")),
    ],
    ids=["empty", "empty time", "fixed", "time", "array", "map", "text", "binary", "extension"],
)
def test_extensions_and_lengths_beyond_the_frame_are_refused_where_any_value_may_stand(value: bytes) -> None:
    frames = frames_with(ms.StatusReply, {"body": {"a": 0}})
    frames[2] = frames[2][:-1] + value
    assert "not valid msgpack" in refusal(frames).detail


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"], ids=["arrays", "maps"])
@pytest.mark.parametrize(("cls", "name"), [(ms.Hello, "role"), (ms.HelloOk, "grants"), (ms.Failed, "code")])
def test_deep_nesting_is_refused_without_exhausting_the_stack(cls: type, name: str, opening: bytes) -> None:
    # msgpack itself stops a little above 500; Python's stack ends at 1,000 frames, fewer than are left here.
    for depth in (100, 400, 480, 500, 505, 508, 510, 520, 5_000, 200_000):
        frames = frames_with(cls, as_plain(sample_of(cls)))
        body = {**as_plain(sample_of(cls)), name: 0}
        packed = [msgpack.packb(key) + msgpack.packb(value) for key, value in body.items() if key != name]
        nested = msgpack.packb(name) + opening * depth + b"\xc0"
        frames[2] = bytes([0x80 + len(body)]) + b"".join(packed) + nested
        assert refusal(frames).code is ErrorCode.BAD_MESSAGE


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [
        (ms.Submit, "prompt_ids", [None] * FAULT_COUNT),
        (ms.Submit, "messages", [None] * FAULT_COUNT),
        (ms.Submit, "sampling", {number.to_bytes(3, "big"): 0 for number in range(FAULT_COUNT)}),
        (ms.Finished, "timings", {f"{number:x}": 0 for number in range(FAULT_COUNT)}),
        (ms.PrefillDone, "chunk_digests", [""] * FAULT_COUNT),
        (ms.HelloOk, "grants", [{}] * FAULT_COUNT),
    ],
    ids=["ids", "messages", "keys", "record", "digests", "grants"],
)
def test_a_message_of_many_faults_does_not_occupy_the_socket_thread(cls: type, name: str, value: Any) -> None:
    frames = changed(sample_of(cls), (), name, value)
    started_ms = now_ms()
    error = refusal(frames)
    assert now_ms() - started_ms < FAULT_BOUND_MS
    assert len(error.detail) < limits.DETAIL_CHARACTERS


@every_sample
def test_no_error_repeats_a_value_or_a_key(sample: Any) -> None:
    # Refusals are logged; what a client sent may be its prompt.
    values = [SECRET, SECRET.encode(), [SECRET], [[SECRET]], {SECRET: SECRET}, {SECRET.encode(): 1}]
    values += [SECRET * 100, [{SECRET: 1}], [{SECRET.encode(): 1}]]
    refused = 0
    for path, cls in records(sample):
        for name in (*hints_of(cls), SECRET, SECRET.encode()):
            for value in values:
                error = refused_or_none(changed(sample, path, name, value))
                if error is not None:
                    refused += 1
                    assert SECRET not in f"{error} {error.detail} {error.args}"
    assert refused >= 2 * len(values)


def refused_or_none(frames: list[bytes]) -> PeerProtocolError | None:
    try:
        decode(frames)
    except PeerProtocolError as error:
        return error
    return None


def test_no_error_of_a_header_or_of_broken_bytes_repeats_them() -> None:
    body = msgpack.packb({"reason": SECRET})
    for head in ({"type": SECRET, "session": SESSION, "sequence": 1}, {SECRET: SECRET}, SECRET):
        assert SECRET not in str(refusal([PROTOCOL_TAG, msgpack.packb(head), body]))
    for frame in (body[:-1], body + body, body.replace(b"what", b"\xff\xfe\xfd\xfc")):
        frames = frames_with(ms.Bye, {})
        assert SECRET not in str(refusal([*frames[:2], frame]))


def test_a_message_of_millions_of_empty_things_is_refused_before_they_are_made() -> None:
    # Eight million empty maps fit in a frame: half a gigabyte, and two seconds of the socket thread.
    count = 1_000_000
    for opening, item in ((b"\xdd", b"\x80"), (b"\xdd", b"\x90"), (b"\xdd", b"\x91\xc0")):
        frames = frames_with(ms.StatusReply, {"body": {"a": 0}})
        frames[2] = frames[2][:-1] + opening + count.to_bytes(4, "big") + item * count
        tracemalloc.start()
        try:
            assert "not valid msgpack" in refusal(frames).detail
            made_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        # An empty map or array takes 56 bytes or more.
        assert made_bytes < 5 * count


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ([{}] * (limits.MESSAGE_CONTAINERS - 3), True),
        ([{}] * (limits.MESSAGE_CONTAINERS - 2), False),
        ({str(number): 0 for number in range(limits.MESSAGE_MAP_ITEMS)}, True),
        ({str(number): 0 for number in range(limits.MESSAGE_MAP_ITEMS + 1)}, False),
        ([0] * limits.MESSAGE_ITEMS, True),
        ([0] * (limits.MESSAGE_ITEMS + 1), False),
    ],
    ids=["containers", "one more", "map", "larger", "array", "longer"],
)
def test_the_limits_of_a_message_are_exact(value: Any, fits: bool) -> None:
    frames = frames_with(ms.StatusReply, {"body": {"a": value}})
    if fits:
        decode(frames)
    else:
        assert refusal(frames).code is ErrorCode.BAD_MESSAGE
