"""Sessions of the prefill core: who is welcome, what each end leaves behind, drain and stall."""

from dataclasses import replace
from typing import Any

import pytest

from common import limits
from common.errors import ErrorCode, ExitStatus
from common.messages import (
    ClientError,
    Draining,
    Grant,
    HelloOk,
    HelloRefused,
    PrefillDone,
    Role,
    SlotGrant,
    StatusReply,
    StatusRequest,
    Submit,
)
from prefill_node import events as ev
from tests.actors import DRAIN_MS, STALL_MS
from tests.devices import PROFILE
from tests.prefill_driver import Node, completions, ended


def exit_of(effects: list[Any]) -> int | None:
    exits = [effect.status for effect in effects if isinstance(effect, ev.ExitNode)]
    assert len(exits) <= 1
    return exits[0] if exits else None


def test_hello_ok_names_session_lease_stall_grants_and_plane() -> None:
    node = Node(slots=1)
    node.step(ev.SessionLost(node.session, Role.DECODE, "bye"))
    answer = node.hello()
    assert (answer.session, answer.grants) == ("session-2", (SlotGrant(0, 0),))
    assert (answer.plane.slot_count, answer.stall_ms) == (1, STALL_MS)


@pytest.mark.parametrize("state", ["idle", "queued", "computing", "held"])
def test_a_session_ends_in_every_state(state: str) -> None:
    node = Node()
    slot = node.bring(state)
    assert node.step(ev.SessionLost(node.session, Role.DECODE, "lease expired")) == []
    assert node.states()[slot] == ("abandoned" if state == "computing" else "pool")
    answer = node.hello(attempt=2)
    granted = [grant.slot for grant in answer.grants]
    busy = {"idle": [], "held": [], "computing": [0], "queued": [0]}[state]
    assert granted == [number for number in (0, 1) if number not in busy]
    epochs = {grant.slot: grant.last_epoch for grant in answer.grants}
    assert epochs.get(slot, 1) == (0 if state == "idle" else 1), "epochs never restart"


@pytest.mark.parametrize("how", ["chunk", "error"])
def test_an_abandoned_slot_is_granted_when_compute_has_answered_and_not_before(how: str) -> None:
    node = Node(slots=1)
    node.prefill(0, 1, tokens=20)
    node.step(ev.SessionLost(node.session, Role.DECODE, "lease expired"))
    answer = node.hello(attempt=2)
    assert answer.grants == ()
    effects = node.chunk(0, 1) if how == "chunk" else node.step(ev.ComputeFailed(0, 1, "boom"))
    assert effects == [ev.SendMessage(answer.session, Grant((SlotGrant(0, 1),)))]
    assert node.states() == ["idle"]


def test_without_a_new_session_an_abandoned_slot_goes_back_to_the_pool_in_silence() -> None:
    node = Node(slots=1)
    node.prefill(0, 1, tokens=20)
    node.step(ev.SessionLost(node.session, Role.DECODE, "lease expired"))
    assert node.chunk(0, 1) == []
    assert node.states() == ["pool"]


def test_work_of_the_new_session_waits_for_the_chunk_of_the_old_one() -> None:
    node = Node()
    node.prefill(0, 1, tokens=20)
    node.step(ev.SessionLost(node.session, Role.DECODE, "lease expired"))
    node.session = node.hello(attempt=2).session
    assert node.prefill(1, 1, tokens=4) == []
    effects = node.chunk(0, 1)
    assert [type(effect) for effect in effects] == [ev.SendMessage, ev.RunChunk]
    assert effects[1].slot == 1


def test_the_end_of_another_session_changes_nothing() -> None:
    node = Node()
    node.bring("held")
    client = node.hello(role=Role.CLIENT, profile=None, incarnation="c1").session
    node.step(ev.SessionLost(client, Role.CLIENT, "bye"))
    assert node.states()[0] == "held"


def test_a_second_decode_node_is_refused_for_the_time_being() -> None:
    node = Node()
    answer = node.hello(incarnation="d2")
    assert isinstance(answer, HelloRefused)
    assert answer.temporary
    node.step(ev.SessionLost(node.session, Role.DECODE, "lease expired"))
    assert isinstance(node.hello(incarnation="d2", attempt=2), HelloOk)


@pytest.mark.parametrize(
    "field",
    [
        "model_id",
        "weights_digest",
        "tokenizer_digest",
        "layers",
        "kv_heads",
        "head_dim",
        "vocab_size",
        "dtype",
    ],
)
def test_a_mismatch_is_refused_for_good_and_names_each_field(field: str) -> None:
    node = Node()
    node.step(ev.SessionLost(node.session, Role.DECODE, "bye"))
    other = 9 if isinstance(getattr(PROFILE, field), int) else "other"
    answer = node.hello(profile=replace(PROFILE, **{field: other, "dtype": "float16"}))
    assert not answer.temporary
    assert set(answer.fields) == {field, "dtype"}
    assert field in answer.detail


def test_a_decode_node_without_a_profile_is_refused() -> None:
    node = Node()
    assert node.hello(profile=None).fields == ("profile",)


@pytest.mark.parametrize("field", ["max_tokens", "chunk_tokens"])
def test_what_is_negotiated_may_differ(field: str) -> None:
    node = Node()
    node.step(ev.SessionLost(node.session, Role.DECODE, "bye"))
    assert isinstance(node.hello(profile=replace(PROFILE, **{field: 7})), HelloOk)


def test_clients_and_status_are_always_accepted_and_jobs_are_sent_to_the_right_node() -> None:
    node = Node()
    node.step(ev.StopRequested())
    client = node.hello(role=Role.CLIENT, profile=None, incarnation="c1").session
    [reply] = node.say(StatusRequest(), client)
    assert isinstance(reply.message, StatusReply)
    assert reply.message.body["draining"] is True
    for _ in range(limits.BAD_MESSAGES_PER_CLIENT):
        [answer] = node.say(Submit("x", prompt="hello"), client)
        assert isinstance(answer.message, ClientError)
        assert "decode node" in answer.message.detail
    assert isinstance(node.say(Submit("x", prompt="hello"), client)[0], ev.CloseSession)


def test_a_message_that_a_decode_node_does_not_send_ends_its_session() -> None:
    assert ended(Node().say(StatusRequest()))


def test_a_drain_is_told_lets_work_end_and_refuses_more() -> None:
    node = Node()
    node.prefill(0, 1, tokens=4)
    assert node.step(ev.StopRequested()) == [ev.SendMessage(node.session, Draining())]
    assert node.step(ev.StopRequested()) == []
    [failure] = completions(node.prefill(1, 1))
    assert failure.code is ErrorCode.DRAINING
    assert node.states()[1] == "idle"
    assert isinstance(completions(node.chunk(0, 1))[0], PrefillDone)
    assert isinstance(node.hello(incarnation="d2"), HelloRefused)
    effects = node.step(ev.SessionLost(node.session, Role.DECODE, "bye"))
    assert exit_of(effects) == ExitStatus.OK


def test_an_idle_node_leaves_at_once() -> None:
    node = Node()
    node.step(ev.SessionLost(node.session, Role.DECODE, "bye"))
    client = node.hello(role=Role.CLIENT, profile=None, incarnation="c1").session
    effects = node.step(ev.StopRequested())
    assert [type(effect) for effect in effects] == [ev.CloseSession, ev.ExitNode]
    assert effects[0].session == client


def test_a_drain_waits_for_compute_even_when_the_session_has_ended() -> None:
    node = Node()
    node.prefill(0, 1, tokens=20)
    node.step(ev.StopRequested())
    assert exit_of(node.step(ev.SessionLost(node.session, Role.DECODE, "bye"))) is None
    assert exit_of(node.chunk(0, 1)) == ExitStatus.OK


def test_a_drain_that_takes_too_long_leaves_with_another_status() -> None:
    node = Node()
    node.bring("held")
    node.step(ev.StopRequested())
    assert node.core.deadline_ms() == DRAIN_MS
    assert node.step(ev.TimePassed(), DRAIN_MS - 1) == []
    effects = node.step(ev.TimePassed(), 1)
    assert exit_of(effects) == ExitStatus.DRAIN_INCOMPLETE
    assert effects[0] == ev.CloseSession(node.session, effects[-1].reason)


def test_a_hung_compute_ends_the_node_with_its_own_status() -> None:
    node = Node()
    node.prefill(0, 1, tokens=20, budget_ms=60_000)
    node.chunk(0, 1, later_ms=STALL_MS - 1)
    assert node.core.deadline_ms() == 2 * STALL_MS - 1, "the clock starts with each chunk"
    assert node.step(ev.TimePassed(), STALL_MS - 1) == []
    assert exit_of(node.step(ev.TimePassed(), 1)) == ExitStatus.HUNG
    assert node.chunk(0, 1) == [], "whatever follows is too late"


def test_a_node_without_work_is_never_hung() -> None:
    node = Node()
    node.bring("held")
    assert node.core.deadline_ms() is None
    assert node.step(ev.TimePassed(), 100 * STALL_MS) == []
