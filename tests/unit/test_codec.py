"""Bytes of the control protocol: what is sent is what arrives, and broken bytes raise one error only.

`tests/golden/protocol_v1.json` holds the frames of one message of each type; a change of those bytes is a
new version of the protocol.
"""

import json
import random
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import client_messages as cm
from common import messages as ms
from common.errors import ErrorCode, PeerProtocolError
from tests.protocol_samples import (
    SAMPLE_IDS,
    SAMPLES,
    SESSION,
    bounds_of,
    every_sample,
    frames_with,
    header_of,
    hints_of,
    refusal,
)
from transport.codec import PROTOCOL_TAG, Header, decode, encode
from transport.strict_types import reader_of

GOLDEN = Path(__file__).parents[1] / "golden" / "protocol_v1.json"
MUTATIONS = 10_000


def json_like() -> st.SearchStrategy:
    leaves = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary()
    leaves |= st.floats(allow_nan=False)
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=4,
    )


def values_of(hint: Any) -> st.SearchStrategy:
    """Every value that a field of this type may have."""
    arguments = get_args(hint)
    plain = {int: st.integers(-(2**63), 2**64 - 1), str: st.text(), bytes: st.binary(), bool: st.booleans()}
    plain[float] = st.floats(allow_nan=False, allow_infinity=False)
    if hint is Any:
        return json_like()
    if hint in plain:
        return plain[hint]
    if is_dataclass(hint):
        return st.builds(hint, **{name: values_of(part) for name, part in hints_of(hint).items()})
    if isinstance(hint, type):
        return st.sampled_from(hint)
    if get_origin(hint) is Annotated:
        low, high = bounds_of(hint)
        return st.integers(low, high) if arguments[0] is int else st.text(max_size=high)
    if get_origin(hint) in (Union, UnionType):
        return st.none() | values_of(arguments[0])
    if get_origin(hint) is tuple:
        return st.lists(values_of(arguments[0]), max_size=4).map(tuple)
    return st.dictionaries(st.text(), values_of(arguments[1]), max_size=4)


@pytest.mark.parametrize("cls", ms.MESSAGE_TYPES.values())
def test_every_message_arrives_as_it_was_sent(cls: type) -> None:
    @settings(max_examples=12, deadline=None)
    @given(message=values_of(cls), session=st.text(max_size=64), sequence=st.integers(1, 2**63 - 1))
    def round_trip(message: Any, session: str, sequence: int) -> None:
        header = Header(None, 0) if cls in ms.UNNUMBERED else Header(session, sequence)
        frames = encode(header, message)
        assert [type(frame) for frame in frames] == [bytes, bytes, bytes]
        arrived_header, arrived = decode(frames)
        assert (arrived_header, arrived) == (header, message)
        assert type(arrived) is cls

    round_trip()


@every_sample
def test_the_bytes_are_those_of_version_1(sample: Any) -> None:
    golden = json.loads(GOLDEN.read_text())
    frames = [bytes.fromhex(frame) for frame in golden[type(sample).__name__]]
    header = header_of(type(sample))
    assert encode(header, sample) == frames
    assert decode(frames) == (header, sample)


def test_there_are_golden_bytes_for_every_type_and_no_other() -> None:
    names = [cls.__name__ for cls in ms.MESSAGE_TYPES.values()]
    assert list(json.loads(GOLDEN.read_text())) == names
    assert names == SAMPLE_IDS


def test_a_field_with_a_default_may_not_be_left_out_either() -> None:
    body = {"incarnation": "i", "attempt": 1, "role": "client", "planes": ["shm"], "memory_probe": None}
    with pytest.raises(PeerProtocolError, match="field profile is missing"):
        decode(frames_with(ms.Hello, body))
    assert decode(frames_with(ms.Hello, body | {"profile": None}))[1] == ms.Hello("i", 1, ms.Role.CLIENT)


def test_what_is_no_message_is_our_own_bug() -> None:
    with pytest.raises(KeyError):
        encode(Header(SESSION, 1), cm.Usage(1, 2))
    with pytest.raises(TypeError, match="set cannot travel"):
        encode(Header(SESSION, 1), ms.StatusReply({"lanes": {1, 2}}))


@pytest.mark.parametrize("hint", [complex, list[int], dict[int, str], int | str, tuple[int, str], set[str]])
def test_a_field_type_that_no_message_may_have_fails_at_import(hint: Any) -> None:
    with pytest.raises(TypeError):
        reader_of(hint)


def only_the_one_error(frames: list[bytes]) -> bool:
    """Decode; whether it was accepted. What is accepted must be a whole message that can be sent on."""
    try:
        header, message = decode(frames)
    except PeerProtocolError as error:
        known = error.code in (ErrorCode.BAD_MESSAGE, ErrorCode.VERSION_MISMATCH)
        return pytest.fail(f"{error!r} for {frames}") if not known or not error.detail else False
    assert decode(encode(header, message))[0] == header
    return True


@settings(max_examples=40, deadline=None)
@given(number=st.sampled_from(list(ms.MESSAGE_TYPES)), body=st.dictionaries(st.text(), json_like()))
def test_random_bodies_raise_nothing_else(number: int, body: Any) -> None:
    only_the_one_error(frames_with(ms.MESSAGE_TYPES[number], body))


@pytest.mark.parametrize("seed", range(2))
def test_random_frames_raise_nothing_else(seed: int) -> None:
    source = random.Random(seed)
    for _ in range(MUTATIONS // 2):
        frames = [source.randbytes(source.randrange(40)) for _ in range(source.randrange(4))]
        assert not only_the_one_error(frames)
        assert not only_the_one_error([PROTOCOL_TAG, *frames])


@pytest.mark.parametrize("seed", range(2))
def test_mutated_frames_raise_nothing_else(seed: int) -> None:
    source = random.Random(seed)
    valid = [encode(header_of(type(sample)), sample) for sample in SAMPLES]
    accepted = 0
    for _ in range(MUTATIONS):
        frames = list(source.choice(valid))
        where = source.randrange(3)
        start = source.randrange(len(frames[where]) + 1)
        inserted = source.choice([b"", source.randbytes(1), source.randbytes(3), source.choice(valid)[2]])
        end = start + source.choice([0, 1, 1, 1, 5])
        frames[where] = frames[where][:start] + inserted + frames[where][end:]
        accepted += only_the_one_error(frames)
    # Some changes only alter a value; many more must be refused.
    assert 0 < accepted < MUTATIONS // 2


@every_sample
def test_every_truncation_of_a_message_is_refused(sample: Any) -> None:
    frames = encode(header_of(type(sample)), sample)
    for where in (0, 1, 2):
        for length in range(len(frames[where])):
            refusal([*frames[:where], frames[where][:length], *frames[where + 1 :]])


def test_duplicate_frames_or_trailing_bytes_are_refused() -> None:
    frames = encode(Header(SESSION, 1), ms.Bye("x"))
    refusal([*frames, frames[2]])
    refusal([*frames[:2], frames[2] + b"\xc0"])
    refusal([*frames[:2], frames[2] * 2])
    refusal([frames[0], frames[1] + msgpack.packb(None), frames[2]])
