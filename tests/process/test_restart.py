"""A node that dies and is back on its endpoint at once: the pair serves again and the other node stays.

The successor has loaded its code before its predecessor is killed, so that its bind follows the death by a
few tens of milliseconds, sooner than any lease or back-off: sockets of the dead are still being torn down.
"""

import pytest

from common.messages import Finished
from tests.process.harness import Daemon
from tests.process.world import PREFETCH, Answer, Pair, World, expected, prompt_of

A, B = prompt_of(120, 80), prompt_of(300, 81)
LOST_TOKENS = 300
ROUNDS = 2
ROUNDS_NIGHTLY = 15
every_kind = pytest.mark.parametrize("kind", ["ipc", "tcp"])
every_role = pytest.mark.parametrize("role", ["prefill", "decode"])


def pair_on(world: World, kind: str) -> Pair:
    def bind(name: str) -> str:
        return "tcp://127.0.0.1:0" if kind == "tcp" else f"ipc://{world.directory}/{name}"

    prefill = world.prefill(bind=bind("prefill"))
    return Pair(world, prefill, world.decode(prefill, *PREFETCH, bind=bind("decode")))


def loaded_successor(pair: Pair, role: str, number: int) -> Daemon:
    """The next daemon on the endpoint of the present one, ready to bind at a word."""
    world, present = pair.world, getattr(pair, role)
    go = world.directory / f"{role}{number}.go"
    route = ("--pd-prefill-worker", pair.prefill.endpoint, *PREFETCH) if role == "decode" else ()
    flags = {"name": f"{role}{number}", "bind": present.endpoint, "wait_for": go}
    successor = world.launch(f"{role}_node", *route, **flags)
    world.wait(go.with_suffix(".waiting").exists, "the successor is loaded")
    return successor


def replace_node(pair: Pair, role: str, number: int, successor: Daemon) -> None:
    """Kill a node; its successor binds at once."""
    pair.world.kill(getattr(pair, role))
    (pair.world.directory / f"{role}{number}.go").touch()
    pair.world.ready(successor)
    setattr(pair, role, successor)


def check_lost(pair: Pair, role: str, lost: Answer) -> None:
    """The job that ran has its one answer, and no wrong token."""
    pair.world.end_of(lost)
    if isinstance(lost.end, Finished):
        assert role == "prefill", "its decode node was killed"
        assert lost.token_ids == expected(B, LOST_TOKENS, ignore_eos=True)
    else:
        assert (lost.code, lost.end.definite) == ("PEER_LOST", False)
        assert lost.token_ids == expected(B, LOST_TOKENS, ignore_eos=True)[: len(lost.token_ids)]


def restart_again_and_again(world: World, kind: str, role: str, rounds: int) -> None:
    pair = pair_on(world, kind)
    other = pair.decode if role == "prefill" else pair.prefill
    client = pair.client
    for number in range(rounds):
        pair.check_job(f"before {number}", A)
        successor = loaded_successor(pair, role, number)
        lost = client.submit(f"lost {number}", B, max_tokens=LOST_TOKENS, ignore_eos=True)
        world.wait(lambda lost=lost: lost.accepted, "it is accepted")
        replace_node(pair, role, number, successor)
        check_lost(pair, role, lost)
        pair.check_job(f"after {number}", A)
    assert other.status is None
    assert len(other.logged("node.ready")) == 1
    pair.audit()


@every_kind
@every_role
def test_a_node_that_restarts_at_once_is_served_again(world: World, kind: str, role: str) -> None:
    restart_again_and_again(world, kind, role, ROUNDS)


@pytest.mark.nightly
@every_kind
@every_role
def test_a_node_may_restart_at_once_many_times(world: World, kind: str, role: str) -> None:
    restart_again_and_again(world, kind, role, ROUNDS_NIGHTLY)


@every_kind
def test_both_nodes_restart_at_once_and_find_each_other(world: World, kind: str) -> None:
    pair = pair_on(world, kind)
    successors = {role: loaded_successor(pair, role, 0) for role in ("prefill", "decode")}
    lost = pair.client.submit("lost", B, max_tokens=LOST_TOKENS, ignore_eos=True)
    world.wait(lambda: lost.accepted, "it is accepted")
    for role in successors:
        world.kill(getattr(pair, role))
    for role, successor in successors.items():
        (world.directory / f"{role}0.go").touch()
        world.ready(successor)
        setattr(pair, role, successor)
    assert world.end_of(lost).code in (None, "PEER_LOST")
    assert lost.token_ids == expected(B, LOST_TOKENS, ignore_eos=True)[: len(lost.token_ids)]
    pair.check_job("after", A)
    pair.audit(imports=1)
