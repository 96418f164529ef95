"""A compute thread that hangs while its process lives: found by progress, in bounded time, on either node.

The hung node answers its jobs, leaves with its own exit status and is replaced on its endpoint; the other
node gives the session up by itself when the hung one does not.
"""

import signal

import pytest

from tests.process.handmade_prefill import HandmadePrefill
from tests.process.harness import Daemon
from tests.process.raw_peer import RawPeer
from tests.process.world import PREFETCH, Pair, World, expected, prompt_of

A, B, C = prompt_of(60, 90), prompt_of(280, 91), prompt_of(120, 92)
STALL_MS = 1_500
# Beyond the bound itself: what a busy machine takes, and the time that last words linger.
SLACK_MS = 4_000
STALL = ("--stall-ms", str(STALL_MS))
LOCAL = ("--on-prefill-failure", "local")


def check_hung(pair: Pair, daemon: Daemon) -> None:
    assert pair.world.exit_of(daemon, deadline_ms=STALL_MS + SLACK_MS) == 5
    assert daemon.logged("node.stopped", status=5)
    pair.world.check_remains(daemon)


def replace_decode(pair: Pair, *flags: str) -> Pair:
    decode = pair.world.decode(pair.prefill, *flags, bind=pair.decode.endpoint)
    after = Pair(pair.world, pair.prefill, decode)
    pair.world.wait_status(decode, lambda status: status["workers"][0]["usable"], "they are a pair")
    return after


@pytest.mark.parametrize("point", ["import.piece", "local.chunk", "decode.step"])
def test_a_decode_node_hung_anywhere_answers_its_jobs_and_leaves(world: World, point: str) -> None:
    flags = LOCAL if point == "local.chunk" else PREFETCH
    pair = world.pair(decode=(*flags, *STALL))
    if point == "local.chunk":
        pair.prefill.spoil("prefill.chunk", "fail")
    pair.decode.hold(point)
    hung = pair.client.submit("B", B, max_tokens=9, ignore_eos=True)
    world.wait_held(pair.decode, point)
    waiting = pair.client.submit("C", C, max_tokens=9, ignore_eos=True)
    for answer, prompt_ids in ((hung, B), (waiting, C)):
        world.end_of(answer, deadline_ms=STALL_MS + SLACK_MS)
        assert (answer.code, answer.end.definite) == ("ENGINE_HUNG", False)
        assert answer.token_ids in ([], expected(prompt_ids, 1, ignore_eos=True))
    check_hung(pair, pair.decode)
    pair.decode.release(point)
    after = replace_decode(pair, *flags)
    after.check_job("after", A)
    after.audit(imports=1)


@pytest.mark.parametrize("point", ["import.piece", "decode.step"])
def test_a_hang_is_found_when_the_job_it_hangs_in_is_gone(world: World, point: str) -> None:
    pair = world.pair(decode=(*PREFETCH, *STALL))
    pair.decode.hold(point)
    gone = pair.client.submit("B", B, max_tokens=9, ignore_eos=True)
    world.wait_held(pair.decode, point)
    pair.client.cancel("B")
    assert world.end_of(gone).code == "CANCELLED"
    check_hung(pair, pair.decode)
    pair.decode.release(point)
    after = replace_decode(pair, *PREFETCH)
    after.check_job("after", A)
    after.audit(imports=1)


@pytest.mark.parametrize("cause", ["drain", "nothing"])
def test_a_prefill_node_hung_with_work_behind_it_leaves_and_the_work_waits_for_its_successor(
    world: World, cause: str
) -> None:
    pair = world.pair(
        prefill=("--source-slots", "2", *STALL), decode=("--pd-remote-only", "--pd-prefetch-next", "2")
    )
    pair.prefill.hold("prefill.chunk")
    hung = pair.client.submit("B", B, max_tokens=9, ignore_eos=True)
    world.wait_held(pair.prefill, "prefill.chunk")
    sent = pair.client.submit("C", C, max_tokens=9, ignore_eos=True)
    queued = [pair.client.submit(f"A{number}", A, max_tokens=9, ignore_eos=True) for number in range(2)]
    world.wait_status(pair.prefill, lambda status: status["queued"] == 1, "C waits for compute")
    if cause == "drain":
        pair.prefill.signal(signal.SIGTERM)
    for answer in (hung, sent):
        world.end_of(answer, deadline_ms=STALL_MS + SLACK_MS)
        assert (answer.code, answer.token_ids) == ("PEER_LOST", [])
    check_hung(pair, pair.prefill)
    assert [answer.end for answer in queued] == [None, None], pair.decode.tail()
    pair.prefill = world.prefill("--source-slots", "2", bind=pair.prefill.endpoint)
    for answer in queued:
        assert world.end_of(answer).token_ids == expected(A, 9, ignore_eos=True)
    pair.audit(imports=2)


def test_a_prefill_node_that_lives_but_makes_no_progress_is_given_up(world: World) -> None:
    endpoint = f"ipc://{world.directory}/handmade"
    decode = world.decode(endpoint, *PREFETCH)
    with RawPeer(decode.endpoint) as peer:
        profile = peer.hello().profile
    prefill = HandmadePrefill(endpoint, profile, stall_ms=STALL_MS)
    world.clients.append(prefill)
    client = world.client(decode)
    answer = client.submit("B", B, max_tokens=9)
    world.wait_status(decode, lambda status: status["workers"][0]["session"], "they have a session")
    session = prefill.session
    world.end_of(answer, deadline_ms=STALL_MS + SLACK_MS)
    assert (answer.code, answer.token_ids) == ("PEER_LOST", [])
    assert "no progress" in world.wait_for_log(decode, "session.ended", session=session)["cause"]
    world.clients.remove(prefill)
    prefill.close()
    world.stop(decode)
