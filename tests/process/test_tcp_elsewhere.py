"""Daemons on hosts that share no memory, have none, or know no pinning: KV goes over TCP, and so they say.

The hosts are this one with something taken away, see `poor_host.py`.
"""

from pathlib import Path

import pytest

from tests.process.harness import STALL_MS, Daemon, slabs_of
from tests.process.poor_host import may_own_memory
from tests.process.world import COMMON, PREFETCH, Pair, World, prompt_of


def launch(world: World, lacks: str, program: str, *flags: str) -> Daemon:
    """A daemon on a host that lacks something."""
    name = f"{program[0]}{len(world.daemons)}"
    bind = f"ipc://{world.directory}/{name}"
    flags = ("--backend", "emulated", "--stall-ms", str(STALL_MS), *COMMON, "--bind", bind, *flags)
    wrapper = ("tests.process.poor_host", lacks) if lacks else ()
    world.daemons.append(Daemon(program, name, Path(world.directory), flags, wrapper))
    return world.daemons[-1]


def pair_of(world: World, of_prefill: str, of_decode: str, *flags: str) -> Pair:
    prefill = world.ready(launch(world, of_prefill, "prefill_node", *flags))
    decode = launch(
        world, of_decode, "decode_node", *PREFETCH, "--pd-prefill-worker", prefill.endpoint, *flags
    )
    world.ready(decode)
    world.wait_for_log(decode, "session.opened")
    return Pair(world, prefill, decode)


def test_auto_takes_tcp_when_the_two_have_each_a_shared_memory_of_their_own(world: World) -> None:
    if not may_own_memory():
        pytest.skip("this user may not have a /dev/shm of its own")
    pair = pair_of(world, "", "common-memory")
    assert len(set(slabs_of(pair.prefill.process.pid))) == 1, "others may share it"
    assert pair.decode.logged("session.opened", kv_plane="tcp")
    pair.check_job("job", prompt_of(300))
    pair.audit(imports=1)


def test_without_shared_memory_and_pinning_a_pair_works_and_warns_of_both(world: World) -> None:
    pair = pair_of(world, "shared-memory,pinning", "shared-memory,pinning", "--cpus", "0")
    assert slabs_of(pair.prefill.process.pid) == []
    assert pair.decode.logged("session.opened", kv_plane="tcp")
    [warned] = pair.prefill.logged("slab.no_shared_memory", level="warning")
    assert "over TCP alone" in warned["detail"]
    for daemon in (pair.prefill, pair.decode):
        assert daemon.logged("node.not_pinned", level="warning")
    pair.check_job("job", prompt_of(300))
    pair.audit(imports=1)


def test_shared_memory_that_is_demanded_and_not_there_is_a_configuration_error_that_helps(
    world: World,
) -> None:
    prefill = launch(world, "shared-memory", "prefill_node", "--kv-plane", "shm")
    assert world.exit_of(prefill) == 2
    [complaint] = [line for line in prefill.complaints if "shared memory" in line]
    assert "--kv-plane" in complaint, "it says what to do"
    assert not prefill.output


@pytest.mark.nightly
def test_a_decode_node_that_demands_shared_memory_leaves_a_prefill_node_that_does_not_share_it(
    world: World,
) -> None:
    if not may_own_memory():
        pytest.skip("this user may not have a /dev/shm of its own")
    prefill = world.prefill()
    flags = (*PREFETCH, "--pd-prefill-worker", prefill.endpoint, "--kv-plane", "shm")
    decode = launch(world, "common-memory", "decode_node", *flags)
    assert world.exit_of(decode) == 3
    refused = decode.logged("hello.refused")[0]["detail"]
    assert "/dev/shm" in refused
    world.stop(prefill)
