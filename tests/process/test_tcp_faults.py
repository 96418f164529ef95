"""The wire or a node fails while KV is on its way: one answer, no wrong token, and the slot comes back.

Between the daemons stands a relay on which a test stops the bulk connection, so that a transfer is in its
middle for as long as that takes. A small prompt then lies in the buffers of the kernel: its record is out and
its chunks are missing. A huge one fills them: sends of it are outstanding, and there is no record yet.
"""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from common.clock import now_ms
from tests.process.harness import DEAD_AFTER_MS, LEASE_MS, Daemon
from tests.process.tcp_relay import TcpRelay, free_ports
from tests.process.world import PREFETCH, Answer, Pair, World, expected, prompt_of

NEAR, FAR = "127.0.0.1", "127.0.0.2"
TCP = ("--kv-plane", "tcp")
# What a busy machine adds to a deadline.
NOISE_MS = 1_500
SMALL, AFTER = prompt_of(300, 3), prompt_of(140, 4)
HUGE_TOKENS = 30_000
LONG = ("--max-tokens", str(HUGE_TOKENS + 100), "--chunk-tokens", "15000")


class Relayed:
    """A pair whose control and bulk connections both go through a relay. One lane, one slot."""

    def __init__(self, world: World, *flags: str, patient: tuple[str, ...] = ()) -> None:
        self.world = world
        # A new session may come before the port of the last one is free again.
        control, *self.bulk = free_ports(5, NEAR, FAR)
        self.relay = TcpRelay(NEAR, FAR, [control, *self.bulk])
        self.flags = (*TCP, *flags)
        self.prefill_bind = f"tcp://{FAR}:{control}"
        self.worker = f"tcp://{NEAR}:{control}"
        self.decode_flags = (*PREFETCH, *self.flags, *patient)
        self.prefill = self.start_prefill()
        self.decode = self.start_decode()
        self.pair = Pair(world, self.prefill, self.decode)
        # KV that came through says that the bulk connection is open: a relay that stops sooner keeps it shut.
        self.pair.check_job("first", prompt_of(20, 6))

    def start_prefill(self) -> Daemon:
        return self.world.prefill(*self.flags, "--kv-port", str(self.bulk[0]), bind=self.prefill_bind)

    def start_decode(self) -> Daemon:
        decode = self.world.decode(self.worker, *self.decode_flags)
        self.world.wait_for_log(decode, "session.opened")
        return decode

    def stop_bulk(self) -> None:
        for port in self.bulk:
            self.relay.stop(port)

    def go_on(self) -> None:
        for port in self.bulk:
            self.relay.go_on(port)

    def submit(self, label: str, prompt_ids: list[int]) -> Answer:
        return self.pair.client.submit(label, prompt_ids, max_tokens=9, ignore_eos=True)

    def submit_and_lose_chunks(self) -> Answer:
        """A job whose record and first token are out, and none of its chunks."""
        self.stop_bulk()
        answer = self.submit("lost", SMALL)
        self.world.wait(lambda: answer.token_ids, "the first token is out")
        return answer

    def submit_huge(self) -> Answer:
        """A job that more KV belongs to than all buffers hold."""
        self.stop_bulk()
        answer = self.submit("huge", prompt_of(HUGE_TOKENS, 5))
        self.wait_prefill_slot("sending")
        return answer

    @property
    def session(self) -> str:
        return self.world.status(self.decode)["workers"][0]["session"]

    def wait_prefill_slot(self, state: str) -> None:
        def condition(status: dict[str, Any]) -> bool:
            return status["slots"][0]["state"] == state

        self.world.wait_status(self.prefill, condition, f"the slot is {state}")

    def wait_pair(self) -> None:
        self.world.wait_status(
            self.decode, lambda status: status["workers"][0]["usable"], "they are a pair again"
        )

    def check_service(self) -> None:
        """The next job is served as ever, and nothing is left of the last one."""
        self.go_on()
        self.wait_pair()
        answer = self.world.end_of(self.submit("after", AFTER))
        assert answer.token_ids == expected(AFTER, 9, ignore_eos=True), answer.end
        assert answer.end.path == "remote"
        Pair(self.world, self.prefill, self.decode).audit()


def check_lost(answer: Answer, prompt_ids: list[int]) -> None:
    """The job failed after its first token, which was the right one."""
    assert answer.code == "PEER_LOST", answer.end
    assert answer.token_ids == expected(prompt_ids, 1, ignore_eos=True)


@pytest.fixture
def relayed(world: World) -> Iterator[Relayed]:
    made = Relayed(world)
    yield made
    made.relay.leave()


@pytest.fixture
def roomy(world: World) -> Iterator[Relayed]:
    """A pair for a huge prompt."""
    made = Relayed(world, *LONG, patient=("--prefill-timeout-ms", "60000"))
    yield made
    made.relay.leave()


def test_a_bulk_connection_that_stands_still_ends_the_session_in_time_and_service_returns(
    relayed: Relayed,
) -> None:
    world = relayed.world
    session = relayed.session
    lost = relayed.submit_and_lose_chunks()
    began_ms = now_ms()
    ended = world.wait_for_log(relayed.decode, "session.ended", session=session)
    assert now_ms() - began_ms <= DEAD_AFTER_MS + NOISE_MS
    assert "KV is missing" in ended["cause"]
    check_lost(world.end_of(lost), SMALL)
    world.wait_for_log(relayed.prefill, "session.ended", session=session)
    relayed.check_service()


def test_a_bulk_connection_that_stands_still_under_a_large_transfer_ends_the_session_in_time(
    roomy: Relayed,
) -> None:
    world = roomy.world
    lost = roomy.submit_huge()
    session, began_ms = roomy.session, now_ms()
    ended = world.wait_for_log(roomy.prefill, "session.ended", session=session)
    assert now_ms() - began_ms <= LEASE_MS + NOISE_MS
    assert "took no KV" in ended["cause"]
    assert world.end_of(lost).code == "PEER_LOST"
    roomy.check_service()


@pytest.mark.nightly
def test_a_large_transfer_that_pauses_for_a_moment_goes_on_where_it_was(roomy: Relayed) -> None:
    world = roomy.world
    answer = roomy.submit_huge()
    session = roomy.session
    roomy.go_on()
    world.end_of(answer)
    assert answer.code is None, answer.end
    assert len(answer.token_ids) == 9
    assert roomy.session == session
    assert world.status(roomy.decode)["counters"]["kv_refused"] == 0, "every byte was right"
    assert sum(roomy.relay.carried.values()) > 128 * HUGE_TOKENS
    roomy.check_service()


def test_a_prefill_node_killed_in_the_middle_of_a_transfer_costs_that_job_alone(relayed: Relayed) -> None:
    world = relayed.world
    lost = relayed.submit_and_lose_chunks()
    world.kill(relayed.prefill)
    check_lost(world.end_of(lost), SMALL)
    relayed.prefill = relayed.start_prefill()
    relayed.check_service()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["relayed", "roomy"])
def test_a_decode_node_killed_in_the_middle_of_a_transfer_gives_its_slot_back(
    kind: str, request: pytest.FixtureRequest
) -> None:
    relayed: Relayed = request.getfixturevalue(kind)
    world = relayed.world
    (relayed.submit_and_lose_chunks if kind == "relayed" else relayed.submit_huge)()
    world.clients.remove(relayed.pair.client)
    relayed.pair.client.close()
    world.kill(relayed.decode)
    relayed.wait_prefill_slot("pool")
    relayed.go_on()
    relayed.decode = relayed.start_decode()
    relayed.pair = Pair(world, relayed.prefill, relayed.decode)
    relayed.check_service()


@pytest.mark.parametrize("kind", ["relayed", pytest.param("roomy", marks=pytest.mark.nightly)])
def test_a_decode_node_that_sleeps_past_its_lease_in_the_middle_of_a_transfer_wakes_to_a_new_session(
    kind: str, request: pytest.FixtureRequest
) -> None:
    relayed: Relayed = request.getfixturevalue(kind)
    world = relayed.world
    lost = relayed.submit_and_lose_chunks() if kind == "relayed" else relayed.submit_huge()
    session = relayed.session
    relayed.decode.signal(signal.SIGSTOP)
    world.wait_for_log(relayed.prefill, "session.ended", session=session)
    relayed.wait_prefill_slot("pool")
    relayed.go_on()
    relayed.decode.signal(signal.SIGCONT)
    assert world.end_of(lost).code == "PEER_LOST"
    assert lost.token_ids in ([], expected(SMALL, 1, ignore_eos=True))
    world.wait_for_log(relayed.decode, "session.ended", session=session)
    relayed.check_service()


@pytest.mark.nightly
def test_a_cancel_in_the_middle_of_a_large_transfer_frees_the_slot_when_the_wire_lets_go(
    roomy: Relayed,
) -> None:
    world = roomy.world
    lost = roomy.submit_huge()
    roomy.pair.client.cancel("huge")
    assert world.end_of(lost).code == "CANCELLED"
    assert roomy.pair.slots() == ["orphaned"]
    roomy.go_on()
    world.wait_for_log(roomy.prefill, "prefill.cancelled")
    roomy.check_service()
