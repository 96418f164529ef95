"""The prefill core when KV is sent: no completion and no slot before everything sent has left.

The tests beside it, in `test_prefill_core.py`, have shared memory, where nothing is sent.
"""

from dataclasses import replace
from typing import Any

import pytest

from common.data_planes import SHM, TCP
from common.errors import ErrorCode, InvariantViolation
from common.messages import (
    Cancel,
    Draining,
    Hello,
    HelloOk,
    HelloRefused,
    PrefillDone,
    Release,
    Role,
    TcpPlane,
)
from prefill_node import events as ev
from prefill_node.core import PrefillCore
from tests.actors import STALL_MS, names, prefill_settings
from tests.devices import CHUNK_TOKENS, PROFILE
from tests.prefill_driver import BUDGET_MS, Node, completions
from transport.bulk import ChunkOffered, ChunksLetGo, PiecesMoved, SendsDropped

PORT = 5_001
PROBE = "/tandem-" + "0" * 22


class SendingNode(Node):
    """A prefill core whose KV goes over TCP. shared: what the wiring finds out of a memory probe."""

    def __init__(self, slots: int = 2, planes: tuple[str, ...] = (TCP,), shared: bool = False) -> None:
        self.shared = shared
        super().__init__(slots)
        settings = replace(prefill_settings("p1", slots), planes=planes)
        self.core = PrefillCore(settings, names("session"))
        self.session = self.hello().session

    def hello(self, **changes: Any) -> HelloOk | HelloRefused:
        defaults = {"planes": self.core.settings.planes, "memory_probe": PROBE}
        hello = replace(Hello("d1", 1, Role.DECODE, PROFILE), **{**defaults, **changes})
        [effect] = self.step(ev.HelloReceived(b"route", hello))
        if isinstance(effect, ev.PreparePlane):
            [effect] = self.step(self.prepared(effect))
        return effect.message

    def prepared(self, wanted: ev.PreparePlane) -> ev.PlanePrepared:
        shared = self.shared and wanted.memory_probe is not None
        return ev.PlanePrepared(wanted.session, wanted.route, None if shared else TcpPlane(PORT))

    def let_go(self, slot: int, epoch: int, chunks: int, session: str | None = None) -> list[Any]:
        return self.step(ChunksLetGo(session or self.session, slot, epoch, chunks))

    def lose(self) -> list[Any]:
        return self.step(ev.SessionLost(self.session, Role.DECODE, "gone"))

    def bring_to(self, state: str) -> None:
        """Slot 0 at epoch 1: COMPUTING its last chunk, or SENDING, with a send outstanding."""
        self.prefill(0, 1, tokens=2 * CHUNK_TOKENS)
        self.chunk(0, 1)
        if state == "sending":
            self.chunk(0, 1)
        assert self.states()[0] == state


@pytest.fixture
def node() -> SendingNode:
    return SendingNode()


def codes(effects: list[Any]) -> list[Any]:
    """What answers a PREFILL: None for a record, else the code of the failure."""
    return [getattr(message, "code", None) for message in completions(effects)]


def of_kind(effects: list[Any], kind: type) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def test_each_chunk_is_offered_at_once_before_the_next_one_is_computed(node: SendingNode) -> None:
    node.prefill(0, 1, tokens=6)
    first = node.chunk(0, 1)
    assert first[0] == ChunkOffered(node.session, 0, 1, 0, 4)
    assert (first[1].start, first[1].end) == (4, 6)
    assert node.chunk(0, 1) == [ChunkOffered(node.session, 0, 1, 4, 6)]


def test_the_record_waits_until_the_last_chunk_has_left_and_compute_does_not(node: SendingNode) -> None:
    node.prefill(0, 1, tokens=6)
    node.prefill(1, 1, tokens=4)
    node.chunk(0, 1)
    effects = node.chunk(0, 1)
    assert completions(effects) == []
    assert [(item.slot, item.epoch) for item in of_kind(effects, ev.RunChunk)] == [(1, 1)]
    assert node.states() == ["sending", "computing"]
    assert completions(node.let_go(0, 1, chunks=1)) == []
    [record] = completions(node.let_go(0, 1, chunks=2))
    assert isinstance(record, PrefillDone)
    assert (record.slot, record.token_count) == (0, 6)
    assert node.states() == ["held", "computing"]
    assert node.let_go(0, 1, chunks=2) == [], "one completion for each PREFILL"


def test_a_record_whose_chunks_have_all_left_goes_out_with_the_last_one(node: SendingNode) -> None:
    node.prefill(0, 1, tokens=6)
    node.chunk(0, 1)
    node.let_go(0, 1, chunks=1)
    node.chunk(0, 1)
    assert codes(node.let_go(0, 1, chunks=2)) == [None]


def test_what_has_left_is_progress(node: SendingNode) -> None:
    node.bring_to("sending")
    before = node.core.progress_count()
    node.let_go(0, 1, chunks=1)
    assert node.core.progress_count() == before + 1
    assert node.step(PiecesMoved(node.session, 0, 1)) == []
    assert node.core.progress_count() == before + 2
    assert node.states()[0] == "sending"


def test_a_held_slot_is_released_and_filled_again_as_ever(node: SendingNode) -> None:
    node.bring_to("sending")
    node.let_go(0, 1, chunks=2)
    assert node.say(Release(0, 1)) == []
    assert isinstance(node.prefill(0, 2)[0], ev.RunChunk)


@pytest.mark.parametrize("state", ["computing", "sending"])
def test_a_cancel_drops_what_waits_and_is_answered_when_the_rest_has_left(
    node: SendingNode, state: str
) -> None:
    node.bring_to(state)
    effects = node.say(Cancel(0, 1))
    if state == "computing":
        assert effects == []
        effects = node.chunk(0, 1)
    assert effects == [SendsDropped(node.session, 0, 1)]
    assert node.states()[0] == "sending"
    chunks = 1 if state == "computing" else 2
    assert codes(node.let_go(0, 1, chunks)) == [ErrorCode.CANCELLED]
    assert node.states()[0] == "idle"
    assert node.core.line.counters["prefills_cancelled"] == 1


def test_a_second_cancel_while_sends_are_dropped_changes_nothing(node: SendingNode) -> None:
    node.bring_to("sending")
    node.say(Cancel(0, 1))
    assert completions(node.say(Cancel(0, 1))) == []
    assert codes(node.let_go(0, 1, chunks=2)) == [ErrorCode.CANCELLED]
    assert node.say(Cancel(0, 1)) == []


def test_a_cancel_of_a_chunk_that_has_left_already_is_answered_at_once(node: SendingNode) -> None:
    node.bring_to("computing")
    node.let_go(0, 1, chunks=1)
    node.say(Cancel(0, 1))
    assert codes(node.chunk(0, 1)) == [ErrorCode.CANCELLED]


def test_a_compute_error_while_chunks_are_on_their_way_waits_for_them(node: SendingNode) -> None:
    node.bring_to("computing")
    effects = node.step(ev.ComputeFailed(0, 1, "out of memory"))
    assert effects == [SendsDropped(node.session, 0, 1)]
    node.prefill(1, 1)
    assert node.states() == ["sending", "computing"], "compute is free for the next one"
    [failure] = completions(node.let_go(0, 1, chunks=1))
    assert (failure.code, failure.detail) == (ErrorCode.PREFILL_ERROR, "out of memory")
    assert node.states()[0] == "idle"


def test_a_budget_that_is_over_between_chunks_drops_what_waits(node: SendingNode) -> None:
    node.prefill(0, 1, tokens=20)
    node.chunk(0, 1)
    effects = node.chunk(0, 1, later_ms=BUDGET_MS)
    assert SendsDropped(node.session, 0, 1) in effects
    assert of_kind(effects, ev.RunChunk) == []
    assert codes(node.let_go(0, 1, chunks=2)) == [ErrorCode.PREFILL_TIMEOUT]


def test_a_budget_that_is_over_while_it_is_sent_is_a_timeout_and_no_record(node: SendingNode) -> None:
    node.bring_to("sending")
    assert node.core.deadline_ms() == BUDGET_MS
    assert node.step(ev.TimePassed(), BUDGET_MS - 1) == []
    assert node.step(ev.TimePassed(), 1) == [SendsDropped(node.session, 0, 1)]
    assert node.core.deadline_ms() is None, "it waits for its sends alone now"
    assert node.step(ev.TimePassed(), 1) == []
    assert codes(node.let_go(0, 1, chunks=2)) == [ErrorCode.PREFILL_TIMEOUT]
    assert node.states()[0] == "idle"


def test_a_cancel_after_the_timeout_has_still_one_answer(node: SendingNode) -> None:
    node.bring_to("sending")
    node.step(ev.TimePassed(), BUDGET_MS)
    node.say(Cancel(0, 1))
    assert len(codes(node.let_go(0, 1, chunks=2))) == 1


@pytest.mark.parametrize("state", ["computing", "sending"])
def test_a_slot_of_an_ended_session_is_granted_again_only_when_nothing_of_it_is_sent(state: str) -> None:
    node = SendingNode(slots=1)
    node.bring_to(state)
    lost = node.session
    node.lose()
    assert node.states() == ["abandoned"]
    following = node.hello(incarnation="d2")
    assert isinstance(following, HelloOk)
    assert following.grants == ()
    node.session = following.session
    if state == "computing":
        assert node.chunk(0, 1) == [], "what compute was at is offered to nobody"
        assert node.states() == ["abandoned"]
    assert node.let_go(0, 1, chunks=9, session=lost) == [], "that is no word of the closed socket"
    assert node.states() == ["abandoned"]
    [granted] = node.step(ev.BulkReleased(lost))
    assert [(grant.slot, grant.last_epoch) for grant in granted.message.grants] == [(0, 1)]
    assert node.states() == ["idle"]


def test_compute_may_be_the_last_to_let_go_of_an_ended_sessions_slot() -> None:
    node = SendingNode(slots=1)
    node.bring_to("computing")
    node.lose()
    assert node.step(ev.BulkReleased(node.session)) == []
    assert node.states() == ["abandoned"]
    node.chunk(0, 1)
    assert node.states() == ["pool"]


def test_every_slot_waits_for_its_own_session(node: SendingNode) -> None:
    node.bring_to("sending")
    lost = node.session
    node.lose()
    node.session = node.hello(incarnation="d2").session
    node.prefill(1, 1, tokens=CHUNK_TOKENS)
    node.chunk(1, 1)
    assert node.states() == ["abandoned", "sending"]
    second, node.session = node.session, "session-3"
    node.step(ev.SessionLost(second, Role.DECODE, "gone"))
    node.step(ev.BulkReleased(second))
    assert node.states() == ["abandoned", "pool"]
    node.step(ev.BulkReleased(lost))
    assert node.states() == ["pool", "pool"]


def test_slots_that_nothing_is_sent_from_go_back_at_once(node: SendingNode) -> None:
    node.bring_to("sending")
    node.let_go(0, 1, chunks=2)
    node.prefill(1, 1, tokens=20)
    node.lose()
    assert node.states() == ["pool", "abandoned"], "the record of slot 0 went out: it is read by nobody"
    assert node.step(ev.BulkReleased(node.session)) == []
    assert node.states() == ["pool", "abandoned"]


def test_late_words_of_the_data_plane_about_an_earlier_production_are_passed_over(node: SendingNode) -> None:
    node.bring_to("sending")
    node.let_go(0, 1, chunks=2)
    node.say(Release(0, 1))
    node.prefill(0, 2, tokens=20)
    node.chunk(0, 2)
    assert node.let_go(0, 1, chunks=9) == []
    assert node.states()[0] == "computing"


def test_a_drain_waits_for_the_decode_node_not_for_the_sends_of_an_ended_session(node: SendingNode) -> None:
    node.bring_to("sending")
    assert node.step(ev.StopRequested()) == [ev.SendMessage(node.session, Draining())]
    assert codes(node.let_go(0, 1, chunks=2)) == [None], "what was begun is answered"
    assert of_kind(node.lose(), ev.ExitNode) == [ev.ExitNode(0, "drained")]


def test_sending_is_no_hang_of_compute(node: SendingNode) -> None:
    node.bring_to("sending")
    effects = node.step(ev.TimePassed(), STALL_MS)
    assert of_kind(effects, ev.ExitNode) == []


def test_a_slot_must_not_be_waiting_for_nothing() -> None:
    node = SendingNode(slots=1)
    node.bring_to("sending")
    node.lose()
    node.core.grants[0].sending_for = None
    with pytest.raises(InvariantViolation, match="INV-2"):
        node.core.check()


def test_shared_memory_offers_nothing_and_waits_for_nothing() -> None:
    node = Node()
    node.prefill(0, 1, tokens=6)
    effects = node.chunk(0, 1) + node.chunk(0, 1)
    assert of_kind(effects, ChunkOffered | SendsDropped) == []
    assert codes(effects) == [None]
    node.prefill(1, 1, tokens=20)
    node.step(ev.SessionLost(node.session, Role.DECODE, "gone"))
    assert node.states() == ["pool", "abandoned"]
    node.chunk(1, 1)
    assert node.states() == ["pool", "pool"], "no word of a data plane is awaited"


@pytest.mark.parametrize(
    ("ours", "theirs", "shared", "bulk"),
    [
        ((SHM,), (SHM,), False, False),
        ((SHM, TCP), (SHM,), False, False),
        ((SHM, TCP), (SHM, TCP), True, False),
        ((SHM, TCP), (SHM, TCP), False, True),
        ((SHM, TCP), (TCP,), True, True),
        ((TCP,), (SHM, TCP), True, True),
        ((TCP,), (TCP,), True, True),
    ],
)
def test_both_sides_get_the_plane_that_both_can_use(
    ours: tuple[str, ...], theirs: tuple[str, ...], shared: bool, bulk: bool
) -> None:
    node = SendingNode(planes=ours, shared=shared)
    node.lose()
    answer = node.hello(planes=theirs)
    assert answer.bulk == (TcpPlane(PORT) if bulk else None)
    assert (answer.plane is None) == bulk, "exactly one"


@pytest.mark.parametrize(("ours", "theirs"), [(SHM, TCP), (TCP, SHM)])
def test_two_nodes_without_a_common_plane_are_told_both_names_and_what_to_do(ours: str, theirs: str) -> None:
    node = SendingNode(planes=(ours,))
    node.lose()
    refused = node.hello(planes=(theirs,))
    assert isinstance(refused, HelloRefused)
    assert (refused.temporary, refused.fields) == (False, ("kv_plane",))
    assert refused.detail == (
        f"this prefill node gives KV over {ours}, the decode node takes it over {theirs}: "
        "start both with the same --kv-plane"
    )


def test_a_port_that_cannot_be_bound_is_a_temporary_refusal() -> None:
    node = SendingNode()
    node.lose()
    hello = Hello("d2", 1, Role.DECODE, PROFILE, (TCP,))
    [wanted] = node.step(ev.HelloReceived(b"route", hello))
    assert wanted.memory_probe is None, "nothing is to be found out"
    [answer] = node.step(ev.PlanePrepared(wanted.session, wanted.route, None, "no port is free"))
    assert answer.message == HelloRefused(True, "no port is free")
    assert node.core.status(0)["decode_sessions"] == []
    assert node.states() == ["pool", "pool"]
