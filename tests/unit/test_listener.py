"""The binding side's sessions: which HELLO counts, what a sequence number proves, when a session is over."""

from dataclasses import replace
from typing import Any

import pytest

from common import limits
from common.errors import ErrorCode
from common.messages import (
    Bye,
    Cancel,
    Hello,
    HelloOk,
    HelloRefused,
    Ping,
    Pong,
    Release,
    Role,
    SessionGone,
    StatusRequest,
)
from tests.actors import TIMES
from tests.devices import PROFILE
from transport.listener import Listener
from transport.peers import (
    Answer,
    BadFrame,
    Delivered,
    EndSession,
    FrameReceived,
    HelloArrived,
    Mistake,
    Post,
    RouteLost,
    SendFrame,
    SessionEnded,
    Tick,
)

LEASE_MS = TIMES.lease_ms


class Side:
    """A listener and sessions opened by hand."""

    def __init__(self) -> None:
        self.progress = 7
        self.listener = Listener(TIMES, lambda: self.progress)

    def step(self, event: Any, now_ms: int = 0) -> list[Any]:
        return self.listener.step(event, now_ms)

    def hello(self, node: str, attempt: int = 1, route: bytes = b"r1", role: Role = Role.DECODE) -> list[Any]:
        return self.step(FrameReceived(route, None, 0, Hello(node, attempt, role, PROFILE)))

    def open(
        self, session: str = "s1", node: str = "n1", attempt: int = 1, route: bytes = b"r1", **more: Any
    ) -> None:
        assert self.hello(node, attempt, route, **more)[-1:] == [
            HelloArrived(route, Hello(node, attempt, more.get("role", Role.DECODE), PROFILE))
        ]
        answer = hello_ok(session)
        assert self.step(Answer(route, answer)) == [SendFrame(route, None, 0, answer)]

    def say(self, sequence: int, message: Any = None, now_ms: int = 0, **place: Any) -> list[Any]:
        frame = FrameReceived(b"r1", "s1", sequence, Cancel(0, 1) if message is None else message)
        return self.step(replace(frame, **place), now_ms)

    @property
    def open_sessions(self) -> list[str]:
        return [session.identity for session in self.listener.sessions]


def hello_ok(session: str) -> HelloOk:
    return HelloOk(session, "binder", LEASE_MS, 2_000, PROFILE)


def opened(role: Role = Role.DECODE) -> Side:
    side = Side()
    side.open(role=role)
    return side


def ending(effects: list[Any]) -> str:
    """The cause of the one session that ended."""
    [ended] = [effect for effect in effects if isinstance(effect, SessionEnded)]
    return ended.cause


def test_messages_in_order_are_delivered_and_answers_are_numbered_from_one() -> None:
    side = opened()
    assert side.say(1) == [Delivered("s1", Cancel(0, 1))]
    assert side.say(2, Release(0, 1)) == [Delivered("s1", Release(0, 1))]
    assert [side.step(Post("s1", SessionGone("x")))[0].sequence for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("sequence", [0, 1, 3, 4])
def test_a_gap_or_a_repeat_ends_the_session_with_a_bye(sequence: int) -> None:
    side = opened()
    side.say(1)
    effects = side.say(sequence)
    assert isinstance(effects[0].message, Bye)
    assert ending(effects).startswith(ErrorCode.SEQUENCE_ERROR)
    assert side.open_sessions == []


def test_after_its_end_a_session_takes_and_sends_nothing() -> None:
    side = opened()
    side.say(5)
    assert side.step(Post("s1", Cancel(0, 1))) == []
    assert side.step(EndSession("s1", "again")) == []
    assert side.say(2) == [SendFrame(b"r1", None, 0, SessionGone("s1"))]


def test_a_message_of_an_unknown_session_is_answered_session_gone_never_pong() -> None:
    side = Side()
    for message in (Ping(), Cancel(0, 1), StatusRequest()):
        assert side.say(1, message) == [SendFrame(b"r1", None, 0, SessionGone("s1"))]
    assert side.listener.stale_messages == 3


@pytest.mark.parametrize("message", [Bye("x"), SessionGone("s1"), hello_ok("s1"), HelloRefused(True, "x")])
def test_session_gone_never_answers_session_gone_bye_or_a_hello_message(message: Any) -> None:
    assert Side().say(1, message) == []


def test_a_session_is_bound_to_the_route_of_its_hello() -> None:
    side = opened()
    assert side.say(1, route=b"r2") == [SendFrame(b"r2", None, 0, SessionGone("s1"))]
    assert side.say(1) == [Delivered("s1", Cancel(0, 1))], "the real one was not disturbed"


def test_session_gone_from_the_peer_ends_the_session_without_a_bye() -> None:
    effects = opened().say(0, SessionGone("s1"))
    assert [type(effect) for effect in effects] == [SessionEnded]


def test_bye_ends_the_session_and_names_its_reason() -> None:
    assert opened().say(1, Bye("enough")) == [SessionEnded("s1", Role.DECODE, "bye: enough")]


def test_a_ping_is_answered_with_the_last_sequence_and_the_progress() -> None:
    side = opened()
    side.progress = 41
    [frame] = side.say(1, Ping())
    assert (frame.session, frame.sequence, frame.message) == ("s1", 1, Pong(1, 41))


def test_the_lease_ends_a_silent_session_and_every_message_renews_it() -> None:
    side = opened()
    assert side.listener.deadline_ms() == LEASE_MS
    side.say(1, Ping(), now_ms=400)
    assert side.listener.deadline_ms() == 400 + LEASE_MS
    assert side.step(Tick(), 399 + LEASE_MS) == []
    effects = side.step(Tick(), 400 + LEASE_MS)
    assert isinstance(effects[0].message, Bye)
    assert ending(effects) == "lease expired"
    assert side.listener.deadline_ms() is None


def test_messages_out_of_order_or_of_another_session_do_not_renew_the_lease() -> None:
    side = opened()
    side.say(1, Ping(), now_ms=900, session="s0")
    side.hello("n1", 1)
    assert ending(side.step(Tick(), LEASE_MS)) == "lease expired"


def test_each_session_has_a_lease_of_its_own() -> None:
    side = opened()
    side.open("s2", "n2", route=b"r2")
    side.say(1, Ping(), now_ms=500)
    effects = side.step(Tick(), LEASE_MS)
    assert [effect.session for effect in effects if isinstance(effect, SessionEnded)] == ["s2"]
    assert side.open_sessions == ["s1"]


def test_a_lost_route_ends_the_sessions_on_it() -> None:
    side = opened()
    side.open("s2", "n2", route=b"r2")
    assert side.step(RouteLost(b"r2")) == [SessionEnded("s2", Role.DECODE, "its socket is gone")]
    assert side.step(RouteLost(b"r3")) == []
    assert side.open_sessions == ["s1"]


def test_the_nodes_own_end_sends_a_bye_with_the_reason() -> None:
    effects = opened().step(EndSession("s1", "drained"))
    assert effects == [
        SendFrame(b"r1", "s1", 1, Bye("drained")),
        SessionEnded("s1", Role.DECODE, "drained"),
    ]


def test_a_repeated_attempt_gets_the_same_answer_and_asks_nobody() -> None:
    side = opened()
    assert side.hello("n1", 1) == [SendFrame(b"r1", None, 0, hello_ok("s1"))]
    assert side.open_sessions == ["s1"]


def test_a_repeated_attempt_before_the_answer_waits_for_it() -> None:
    side = Side()
    assert len(side.hello("n1", 1)) == 1
    assert side.hello("n1", 1) == []


@pytest.mark.parametrize("answer", ["ok", "refused"])
def test_an_older_attempt_is_counted_and_ignored(answer: str) -> None:
    side = Side()
    side.hello("n1", 5)
    refusal = HelloRefused(True, "later")
    side.step(Answer(b"r1", hello_ok("s1") if answer == "ok" else refusal))
    assert side.hello("n1", 4, route=b"r0") == []
    assert side.listener.stale_messages == 1
    assert side.open_sessions == (["s1"] if answer == "ok" else [])


def test_the_same_attempt_from_another_route_is_not_answered() -> None:
    side = opened()
    assert side.hello("n1", 1, route=b"r2") == []


def test_a_newer_attempt_ends_the_earlier_session_at_once() -> None:
    side = opened()
    effects = side.hello("n1", 2, route=b"r2")
    assert [type(effect) for effect in effects] == [SessionEnded, HelloArrived]
    assert effects[0].session == "s1"
    side.step(Answer(b"r2", hello_ok("s2")))
    assert side.open_sessions == ["s2"]
    assert side.say(1) == [SendFrame(b"r1", None, 0, SessionGone("s1"))], "old messages have no effect"


def test_a_new_incarnation_is_another_node_and_leaves_the_earlier_session_alone() -> None:
    side = opened()
    assert [type(effect) for effect in side.hello("n2", 1, route=b"r2")] == [HelloArrived]
    assert side.open_sessions == ["s1"]


def test_a_refused_attempt_has_no_session() -> None:
    side = Side()
    side.hello("n1")
    refusal = HelloRefused(False, "no", ("dtype",))
    assert side.step(Answer(b"r1", refusal)) == [SendFrame(b"r1", None, 0, refusal)]
    assert side.say(1) == [SendFrame(b"r1", None, 0, SessionGone("s1"))]
    side.open("s1", "n1", attempt=2, route=b"r2")
    assert side.open_sessions == ["s1"]


def bad(code: ErrorCode = ErrorCode.BAD_MESSAGE, session: str | None = "s1", sequence: int = 1) -> BadFrame:
    return BadFrame(b"r1", session, sequence, code, "odd")


def test_a_bad_frame_of_no_session_is_counted_only() -> None:
    side = Side()
    assert side.step(bad()) == []
    assert side.listener.stale_messages == 1


def test_another_protocol_version_is_refused_by_name() -> None:
    [frame] = Side().step(bad(ErrorCode.VERSION_MISMATCH, None, 0))
    assert (frame.session, frame.sequence) == (None, 0)
    assert frame.message == HelloRefused(False, "odd", ("version",))


def test_a_bad_frame_ends_a_nodes_session() -> None:
    effects = opened().step(bad())
    assert isinstance(effects[0].message, Bye)
    assert ending(effects).startswith(ErrorCode.PROTOCOL_ERROR)


def test_a_bad_frame_of_a_client_is_a_mistake_and_keeps_its_place_in_the_row() -> None:
    side = opened(Role.CLIENT)
    assert side.step(bad()) == [Mistake("s1", ErrorCode.BAD_MESSAGE, "odd")]
    assert side.say(2) == [Delivered("s1", Cancel(0, 1))]


@pytest.mark.parametrize("place", [{"session": None, "sequence": 0}, {"sequence": 2}, {"session": "s2"}])
def test_a_bad_frame_of_a_client_without_a_place_in_the_row_ends_its_session(place: dict) -> None:
    effects = opened(Role.CLIENT).step(replace(bad(), **place))
    assert ending(effects).startswith(ErrorCode.PROTOCOL_ERROR)


def crowd(side: Side, number: int, prefix: str = "crowd", role: Role = Role.CLIENT) -> None:
    for index in range(number):
        name = f"{prefix}-{index}"
        side.open(name, name, route=name.encode(), role=role)


def test_further_sessions_are_refused_for_the_time_being_at_the_limit() -> None:
    side = Side()
    crowd(side, limits.SESSIONS)
    [frame] = side.hello("late", route=b"late", role=Role.CLIENT)
    assert frame.message.temporary
    assert len(side.open_sessions) == limits.SESSIONS
    effects = side.hello("crowd-0", 2, route=b"again", role=Role.CLIENT)
    assert [type(effect) for effect in effects] == [SessionEnded, HelloArrived], "a known node may renew"


def test_the_limit_holds_for_nodes_that_come_back_after_their_session_ended() -> None:
    side = Side()
    crowd(side, limits.SESSIONS, "old")
    for name in side.open_sessions:
        side.step(RouteLost(name.encode()))
    crowd(side, limits.SESSIONS, "new")
    [frame] = side.hello("old-5", 2, route=b"back", role=Role.CLIENT)
    assert isinstance(frame, SendFrame)
    assert frame.message.temporary


@pytest.mark.parametrize(
    ("crowding", "coming", "limit"),
    [
        (Role.CLIENT, Role.DECODE, limits.SESSIONS),
        (Role.DECODE, Role.CLIENT, limits.DECODE_SESSIONS),
    ],
)
def test_a_crowd_of_one_role_leaves_room_for_the_other(crowding: Role, coming: Role, limit: int) -> None:
    side = Side()
    crowd(side, limit, role=crowding)
    [refused] = side.hello("late", route=b"late", role=crowding)
    assert refused.message.temporary
    side.open("other", "other", route=b"other", role=coming)
    assert len(side.open_sessions) == limit + 1


def test_a_client_that_names_itself_like_a_decode_node_does_nothing_to_its_session() -> None:
    side = Side()
    side.open("s1", "n1", role=Role.DECODE)
    [arrived] = side.hello("n1", 2**62, route=b"stranger", role=Role.CLIENT)
    assert isinstance(arrived, HelloArrived)
    assert side.open_sessions == ["s1"]
    effects = side.hello("n1", 2, route=b"r2", role=Role.DECODE)
    assert [type(effect) for effect in effects] == [SessionEnded, HelloArrived], "nor to its next attempt"


def test_a_long_session_is_still_superseded_after_thousands_of_short_ones() -> None:
    side = opened()
    for index in range(2 * limits.SESSIONS + 10):
        name = f"short-{index}"
        side.open(name, name, route=name.encode(), role=Role.CLIENT)
        side.step(RouteLost(name.encode()))
    assert side.open_sessions == ["s1"]
    effects = side.hello("n1", 2, route=b"r2")
    assert [type(effect) for effect in effects] == [SessionEnded, HelloArrived]
    assert side.hello("n1", 1, route=b"r0") == []


def test_attempts_of_nodes_that_have_gone_are_forgotten_in_the_end() -> None:
    side = Side()
    for index in range(5 * limits.SESSIONS):
        side.hello(f"n{index}", route=b"r%d" % index)
        side.step(Answer(b"r%d" % index, HelloRefused(True, "later")))
    assert len(side.listener._attempts) <= 2 * limits.SESSIONS
