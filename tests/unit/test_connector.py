"""The connecting side: one attempt, one socket, one HELLO; back-off, silence, and when a session is over."""

from dataclasses import replace
from typing import Any

import pytest

from common.errors import ErrorCode
from common.messages import (
    Bye,
    Cancel,
    Draining,
    Hello,
    HelloOk,
    HelloRefused,
    Ping,
    Pong,
    Role,
    SessionGone,
)
from tests.actors import TIMES
from tests.devices import PROFILE
from transport.connector import Connector
from transport.peers import (
    AttemptRefused,
    BadFrame,
    CloseSocket,
    Delivered,
    EndSession,
    FrameReceived,
    OpenSocket,
    Post,
    RouteLost,
    SendFrame,
    SessionEnded,
    SessionOpened,
    StopConnecting,
    Suspected,
    Tick,
)

OK = HelloOk("s1", "p1", 1_000, 2_000, PROFILE)


class Side:
    """A connector, its clock, and the route of its newest attempt."""

    def __init__(self) -> None:
        self.connector = Connector(TIMES, "d1", Role.DECODE, PROFILE)
        self.now_ms = 0
        self.attempt = 0

    def step(self, event: Any, later_ms: int = 0) -> list[Any]:
        self.now_ms += later_ms
        effects = self.connector.step(event, self.now_ms)
        self.attempt += sum(isinstance(effect, OpenSocket) for effect in effects)
        return effects

    def tick(self, later_ms: int = 0) -> list[Any]:
        return self.step(Tick(), later_ms)

    @property
    def route(self) -> bytes:
        return b"attempt-%d" % self.attempt

    def hear(self, message: Any, sequence: int = 0, session: str | None = None, **more: Any) -> list[Any]:
        frame = FrameReceived(self.route, session, sequence, message)
        return self.step(replace(frame, **more))

    def say(self, sequence: int, message: Any = None, session: str = "s1") -> list[Any]:
        return self.hear(Draining() if message is None else message, sequence, session)

    def open(self, answer: HelloOk = OK) -> None:
        assert self.hear(answer) == [SessionOpened(answer)]

    def wait_for_attempt(self) -> int:
        """Go to the next attempt; how long that took."""
        started_ms = self.now_ms
        self.now_ms = self.connector.deadline_ms()
        assert [type(effect) for effect in self.tick()] == [OpenSocket, SendFrame]
        return self.now_ms - started_ms


def opened() -> Side:
    side = Side()
    side.tick()
    side.open()
    return side


def ending(effects: list[Any]) -> str:
    """The cause of the end; the socket is closed with it."""
    assert [type(effect) for effect in effects[-2:]] == [CloseSocket, SessionEnded]
    return effects[-1].cause


def test_an_attempt_is_a_new_socket_with_one_hello_of_a_greater_number() -> None:
    side = Side()
    assert side.connector.deadline_ms() == 0
    for attempt in (1, 2, 3):
        route = b"attempt-%d" % attempt
        side.now_ms = side.connector.deadline_ms()
        assert side.tick() == [
            OpenSocket(route),
            SendFrame(route, None, 0, Hello("d1", attempt, Role.DECODE, PROFILE)),
        ]
        assert side.tick(TIMES.hello_timeout_ms) == [CloseSocket(route)]


def test_an_unanswered_hello_is_given_up_in_time_and_tried_again_with_growing_pauses() -> None:
    side = Side()
    side.tick()
    pauses = []
    for _ in range(6):
        assert side.tick(TIMES.hello_timeout_ms - 1) == []
        assert [type(effect) for effect in side.tick(1)] == [CloseSocket]
        pauses.append(side.wait_for_attempt())
    assert pauses == [50, 100, 200, 400, 400, 400]


def test_a_session_that_spoke_resets_the_pauses() -> None:
    side = Side()
    side.tick()
    for _ in range(4):
        side.tick(TIMES.hello_timeout_ms)
        side.wait_for_attempt()
    side.open()
    side.say(1)
    side.step(EndSession("s1", "test"))
    assert side.wait_for_attempt() == TIMES.backoff_min_ms


def test_sessions_that_end_before_the_peer_has_said_anything_are_tried_ever_more_slowly() -> None:
    side = Side()
    side.tick()
    pauses = []
    for _ in range(5):
        side.open()
        side.step(EndSession("s1", "its slab cannot be mapped"))
        pauses.append(side.wait_for_attempt())
    assert pauses == [50, 100, 200, 400, 400]


def test_a_refusal_is_reported_and_tried_again_whichever_it_is() -> None:
    for temporary in (True, False):
        side = Side()
        side.tick()
        refusal = HelloRefused(temporary, "no", ("dtype",))
        assert side.hear(refusal) == [CloseSocket(b"attempt-1"), AttemptRefused(refusal)]
        assert side.hear(refusal) == [], "its socket is closed"
        assert side.wait_for_attempt() == TIMES.backoff_min_ms


def test_an_answer_to_an_attempt_that_was_given_up_opens_nothing() -> None:
    side = Side()
    side.tick()
    side.tick(TIMES.hello_timeout_ms)
    assert side.hear(OK) == []
    side.wait_for_attempt()
    assert side.hear(OK, route=b"attempt-1") == []
    assert side.connector.stale_messages == 2
    side.open()


def test_a_repeated_answer_changes_nothing() -> None:
    side = opened()
    assert side.hear(OK) == []
    assert side.hear(replace(OK, session="s2")) == []
    assert side.say(1) == [Delivered("s1", Draining())]


def test_messages_in_order_are_delivered_and_ours_are_numbered_from_one() -> None:
    side = opened()
    assert side.say(1) == [Delivered("s1", Draining())]
    assert side.say(2, Pong(1, 3)) == [Delivered("s1", Pong(1, 3))]
    frames = [side.step(Post("s1", Cancel(0, 1)))[0] for _ in range(3)]
    assert [(frame.session, frame.sequence, frame.route) for frame in frames] == [
        ("s1", number, b"attempt-1") for number in (1, 2, 3)
    ]


@pytest.mark.parametrize("sequence", [0, 1, 3])
def test_a_gap_or_a_repeat_ends_the_session_with_a_bye(sequence: int) -> None:
    side = opened()
    side.say(1)
    effects = side.say(sequence)
    assert isinstance(effects[0].message, Bye)
    assert ending(effects).startswith(ErrorCode.SEQUENCE_ERROR)


def test_numbers_begin_anew_with_each_session() -> None:
    side = opened()
    side.say(1)
    side.step(Post("s1", Cancel(0, 1)))
    side.step(EndSession("s1", "test"))
    side.wait_for_attempt()
    side.open(replace(OK, session="s2"))
    assert side.say(1, session="s2") == [Delivered("s2", Draining())]
    assert side.step(Post("s2", Cancel(0, 1)))[0].sequence == 1


def test_messages_of_another_session_or_socket_are_counted_not_obeyed() -> None:
    side = opened()
    assert side.say(1, session="s0") == []
    assert side.hear(Draining(), 1, "s1", route=b"attempt-0") == []
    assert side.hear(SessionGone("s0")) == []
    assert side.connector.stale_messages == 3
    assert side.say(1) == [Delivered("s1", Draining())]


def test_session_gone_ends_the_current_session_without_a_bye() -> None:
    effects = opened().hear(SessionGone("s1"))
    assert len(effects) == 2
    assert "no longer knows" in ending(effects)


def test_bye_ends_the_session_and_names_its_reason() -> None:
    effects = opened().say(1, Bye("enough"))
    assert ending(effects) == "bye: enough"
    assert len(effects) == 2


def test_posts_and_ends_of_another_session_are_dropped() -> None:
    side = opened()
    assert side.step(Post("s0", Cancel(0, 1))) == []
    assert side.step(EndSession("s0", "x")) == []
    side.step(EndSession("s1", "x"))
    assert side.step(Post("s1", Cancel(0, 1))) == []


def test_pings_keep_their_interval_and_carry_numbers() -> None:
    side = opened()
    sent = []
    for _ in range(4):
        side.now_ms = side.connector.deadline_ms()
        sent += [(side.now_ms, frame.sequence, frame.message) for frame in side.tick()]
        side.say(len(sent), Pong(len(sent), 0))
    assert sent == [(TIMES.ping_ms * number, number, Ping()) for number in (1, 2, 3, 4)]


def test_silence_is_suspected_once_and_then_taken_for_death() -> None:
    side = opened()
    events = []
    while side.connector._session is not None:
        side.now_ms = side.connector.deadline_ms()
        events += [(side.now_ms, type(effect)) for effect in side.tick()]
    moments = dict(reversed([(kind, now_ms) for now_ms, kind in events]))
    assert moments[Suspected] == TIMES.suspect_ms
    assert moments[SessionEnded] == TIMES.dead_after_ms
    assert [kind for _, kind in events].count(Suspected) == 1


def test_a_suspected_peer_that_speaks_is_trusted_again() -> None:
    side = opened()
    assert Suspected("s1", True) in side.tick(TIMES.suspect_ms)
    assert side.say(1) == [Suspected("s1", False), Delivered("s1", Draining())]
    assert side.say(2) == [Delivered("s1", Draining())]
    assert Suspected("s1", True) in side.tick(TIMES.suspect_ms), "and may be suspected again"


def test_only_valid_messages_of_the_session_count_as_life() -> None:
    side = opened()
    side.now_ms = TIMES.dead_after_ms - 1
    side.say(1, session="s0")
    side.hear(SessionGone("s0"))
    side.hear(OK)
    assert "silent" in ending(side.tick(1))


def test_a_lost_route_ends_the_session_or_the_attempt() -> None:
    effects = opened().step(RouteLost(b"attempt-1"))
    assert ending(effects) == "its socket is gone"
    side = Side()
    side.tick()
    assert side.step(RouteLost(b"attempt-1")) == [CloseSocket(b"attempt-1")]
    assert side.wait_for_attempt() == TIMES.backoff_min_ms
    assert side.step(RouteLost(b"attempt-1")) == [], "an older attempt's route"


def bad(route: bytes = b"attempt-1", code: ErrorCode = ErrorCode.BAD_MESSAGE) -> BadFrame:
    return BadFrame(route, None, 0, code, "odd")


def test_a_bad_frame_ends_the_session() -> None:
    effects = opened().step(bad())
    assert isinstance(effects[0].message, Bye)
    assert ending(effects).startswith(ErrorCode.PROTOCOL_ERROR)


def test_a_bad_frame_of_another_attempt_is_nothing() -> None:
    side = opened()
    assert side.step(bad(b"attempt-0")) == []
    assert side.say(1) == [Delivered("s1", Draining())]


def test_an_answer_in_another_protocol_version_is_a_mismatch_that_names_it() -> None:
    side = Side()
    side.tick()
    assert side.step(bad()) == [], "garbage is waited out"
    effects = side.step(bad(code=ErrorCode.VERSION_MISMATCH))
    assert effects == [CloseSocket(b"attempt-1"), AttemptRefused(HelloRefused(False, "odd", ("version",)))]
    assert side.step(bad(code=ErrorCode.VERSION_MISMATCH)) == []


@pytest.mark.parametrize("stage", ["before", "attempt", "session", "pause"])
def test_after_stop_no_further_attempt_is_made(stage: str) -> None:
    side = Side()
    if stage != "before":
        side.tick()
    if stage in ("session", "pause"):
        side.open()
    if stage == "pause":
        side.step(EndSession("s1", "x"))
    effects = side.step(StopConnecting("leaving"))
    kinds = {
        "before": [],
        "attempt": [CloseSocket],
        "session": [SendFrame, CloseSocket, SessionEnded],
        "pause": [],
    }
    assert [type(effect) for effect in effects] == kinds[stage]
    assert side.connector.deadline_ms() is None
    assert side.tick(100_000) == []
    assert side.hear(OK) == []


def test_a_client_declares_no_profile() -> None:
    [_, hello] = Connector(TIMES, "c1", Role.CLIENT).step(Tick(), 0)
    assert hello.message == Hello("c1", 1, Role.CLIENT, None)
