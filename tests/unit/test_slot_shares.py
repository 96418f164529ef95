"""Slots of one prefill node shared by several decode nodes: shares, returns, and who goes first."""

from typing import Any

import pytest

from common.messages import Cancel, Grant, GrantLimit, HelloOk, Hurry, PrefillDone, ReturnSlots, Role
from prefill_node import events as ev
from tests.devices import CHUNK_TOKENS
from tests.prefill_driver import Node, completions, ended


def told(effects: list[Any]) -> list[tuple[str, Any]]:
    """Who was sent what."""
    return [(effect.session, effect.message) for effect in effects if isinstance(effect, ev.SendMessage)]


def running(effects: list[Any]) -> list[tuple[int, int, int]]:
    """Slot and bounds of what compute was asked for."""
    return [(each.slot, each.start, each.end) for each in effects if isinstance(each, ev.RunChunk)]


def second(node: Node) -> HelloOk:
    return node.hello(incarnation="d2")


def test_the_first_decode_node_has_the_whole_slab_until_another_one_comes() -> None:
    node = Node(slots=4, decode_nodes=4)
    assert len(node.core.grants.held_by(node.session)) == 4
    answer = second(node)
    assert answer.grants == (), "every slot is granted, and some may be in use"
    assert told(node.after_hello) == [(node.session, GrantLimit(2))]


def test_a_returned_slot_is_granted_to_the_other_node_at_once() -> None:
    node = Node(slots=4, decode_nodes=4)
    node.prefill(1, 1)
    newcomer = second(node).session
    effects = told(node.say(ReturnSlots((0, 2))))
    assert [(session, type(message)) for session, message in effects] == [(newcomer, Grant)]
    assert [grant.slot for grant in effects[0][1].grants] == [0, 2]
    assert len(node.core.grants.held_by(newcomer)) == 2


def test_a_returned_slot_keeps_its_epoch() -> None:
    node = Node(slots=2, decode_nodes=2)
    node.prefill(0, 9, tokens=CHUNK_TOKENS)
    node.say(Cancel(0, 9))
    node.chunk(0, 9)
    second(node)
    [(_, granted)] = told(node.say(ReturnSlots((0,))))
    assert [(grant.slot, grant.last_epoch) for grant in granted.grants] == [(0, 9)]


@pytest.mark.parametrize("slots", [(1,), (0, 1), (7,)])
def test_a_slot_that_is_in_use_or_nobodys_cannot_be_returned(slots: tuple[int, ...]) -> None:
    node = Node(slots=2, decode_nodes=2)
    node.prefill(1, 1)
    second(node)
    assert ended(node.say(ReturnSlots(slots)))
    assert node.states() == ["idle", "computing"], "nothing was taken before the whole was looked at"


def test_when_a_node_leaves_the_others_are_told_and_get_its_slots() -> None:
    node = Node(slots=4, decode_nodes=4)
    newcomer = second(node).session
    node.say(ReturnSlots((0, 1)))
    effects = told(node.step(ev.SessionLost(newcomer, Role.DECODE, "bye")))
    assert [(session, type(message)) for session, message in effects] == [
        (node.session, GrantLimit),
        (node.session, Grant),
    ]
    assert effects[0][1].slots == 4
    assert len(node.core.grants.held_by(node.session)) == 4


def test_what_does_not_divide_goes_to_who_came_first() -> None:
    node = Node(slots=5, decode_nodes=5)
    second(node)
    assert told(node.after_hello) == [(node.session, GrantLimit(3))]
    node.hello(incarnation="d3")
    assert told(node.after_hello) == [(node.session, GrantLimit(2))]


@pytest.mark.parametrize("decode_nodes", [1, 2])
def test_a_node_that_could_have_no_slot_is_refused_for_now_and_told_the_flag(decode_nodes: int) -> None:
    node = Node(slots=decode_nodes, decode_nodes=decode_nodes)
    for number in range(1, decode_nodes):
        node.hello(incarnation=f"other{number}")
    answer = node.hello(incarnation="one-too-many")
    assert answer.temporary
    assert "--source-slots" in answer.detail


def test_an_urgent_prompt_goes_before_those_that_no_lane_waits_for() -> None:
    node = Node(slots=3)
    node.prefill(0, 1, tokens=CHUNK_TOKENS)
    node.prefill(1, 1)
    node.prefill(2, 1, urgent=True)
    assert [slot for slot, _, _ in running(node.chunk(0, 1))] == [2]


def test_an_urgent_prompt_pauses_another_one_at_its_next_chunk_and_that_goes_on_behind_it() -> None:
    node = Node(slots=2)
    assert running(node.prefill(0, 1, tokens=3 * CHUNK_TOKENS)) == [(0, 0, CHUNK_TOKENS)]
    node.prefill(1, 1, tokens=CHUNK_TOKENS, urgent=True)
    assert running(node.chunk(0, 1)) == [(1, 0, CHUNK_TOKENS)]
    assert node.states() == ["queued", "computing"]
    effects = node.chunk(1, 1)
    assert [type(message) for message in completions(effects)] == [PrefillDone]
    assert running(effects) == [(0, CHUNK_TOKENS, 2 * CHUNK_TOKENS)]
    node.chunk(0, 1)
    [record] = completions(node.chunk(0, 1))
    assert len(record.chunk_digests) == 3, "nothing of it was computed twice, or left out"


def test_urgent_prompts_do_not_pause_each_other() -> None:
    node = Node(slots=2)
    node.prefill(0, 1, tokens=2 * CHUNK_TOKENS, urgent=True)
    node.prefill(1, 1, urgent=True)
    assert running(node.chunk(0, 1)) == [(0, CHUNK_TOKENS, 2 * CHUNK_TOKENS)]


def test_a_prompt_becomes_urgent_when_a_lane_comes_to_wait_for_it() -> None:
    node = Node(slots=3)
    node.prefill(0, 1, tokens=CHUNK_TOKENS)
    node.prefill(1, 1)
    node.prefill(2, 1)
    node.say(Hurry(2, 1))
    assert [slot for slot, _, _ in running(node.chunk(0, 1))] == [2]


def test_to_hurry_what_was_answered_already_is_no_mistake() -> None:
    node = Node()
    node.prefill(0, 1, tokens=CHUNK_TOKENS)
    node.chunk(0, 1)
    assert node.say(Hurry(0, 1)) == []


@pytest.mark.parametrize("message", [Hurry(0, 5), Hurry(9, 1)])
def test_to_hurry_what_was_never_sent_ends_the_session(message: Hurry) -> None:
    node = Node()
    node.prefill(0, 1)
    assert ended(node.say(message))


def paused() -> Node:
    """Slot 0 is paused, slot 1 computes."""
    node = Node(slots=2)
    node.prefill(0, 1, tokens=3 * CHUNK_TOKENS)
    node.prefill(1, 1, tokens=CHUNK_TOKENS, urgent=True)
    node.chunk(0, 1)
    return node


def test_a_paused_prompt_is_cancelled_at_once() -> None:
    node = paused()
    [failure] = completions(node.say(Cancel(0, 1)))
    assert (failure.slot, failure.code) == (0, "CANCELLED")
    assert node.states() == ["idle", "computing"]


def test_a_paused_prompt_fails_when_its_budget_is_over() -> None:
    node = paused()
    [failure] = completions(node.step(ev.TimePassed(), later_ms=1_500))
    assert (failure.slot, failure.code) == (0, "PREFILL_TIMEOUT")


def test_the_slot_of_a_paused_prompt_goes_back_when_its_session_ends() -> None:
    node = paused()
    node.step(ev.SessionLost(node.session, Role.DECODE, "lease expired"))
    assert node.states() == ["pool", "abandoned"]
