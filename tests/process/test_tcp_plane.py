"""KV over TCP between real daemons: which plane a pair takes, what it answers, and what it leaves behind.

What happens when one of them, or the wire, fails in the middle of a transfer is in `test_tcp_faults.py`.
"""

from pathlib import Path

import pytest

from common.messages import Finished
from tests.process.harness import Daemon, slabs_of
from tests.process.tcp_relay import free_ports
from tests.process.world import PREFETCH, REMOTE, Pair, World, expected, prompt_of

TCP = ("--kv-plane", "tcp")
SHM = ("--kv-plane", "shm")
LENGTHS = (1, 127, 128, 129, 300, 700)


def plane_of(pair: Pair) -> str:
    return pair.world.status(pair.decode)["workers"][0]["kv_plane"]


def listening_ports(daemon: Daemon) -> set[int]:
    """TCP ports that the process listens at."""
    links = [path.readlink().name for path in Path(f"/proc/{daemon.process.pid}/fd").iterdir()]
    inodes = {name[8:-1] for name in links if name.startswith("socket:")}
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A" and line[9] in inodes}


@pytest.mark.parametrize("flags", [PREFETCH, REMOTE], ids=["prefetch", "no prefetch"])
def test_jobs_over_tcp_have_the_right_tokens_and_nothing_is_left(world: World, flags: tuple) -> None:
    pair = world.pair(TCP, (*flags, *TCP))
    assert plane_of(pair) == "tcp"
    assert slabs_of(pair.prefill.process.pid) == [], "no shared memory is made for nobody"
    prompts = [prompt_of(length, 7) for length in LENGTHS]
    answers = [pair.client.submit(f"{len(ids)}", ids, max_tokens=9, ignore_eos=True) for ids in prompts]
    for ids, answer in zip(prompts, answers, strict=True):
        assert isinstance(world.end_of(answer).end, Finished), answer.end
        assert answer.token_ids == expected(ids, 9, ignore_eos=True)
        assert answer.end.path == "remote"
    status = world.status(pair.decode)
    assert (status["counters"]["prefetches"] > 0) == (flags is PREFETCH)
    pair.audit(imports=len(prompts))
    assert not [entry for entry in pair.decode.entries if entry["level"] in ("warning", "error")]


def test_on_one_host_auto_takes_shared_memory_and_leaves_no_probe_behind(world: World) -> None:
    before = set(Path("/dev/shm").glob("tandem-*"))
    pair = world.pair()
    assert plane_of(pair) == "shm"
    left = set(Path("/dev/shm").glob("tandem-*")) - before - set(pair.prefill.slabs)
    assert [path for path in left if path.exists() and _is_probe(path, pair)] == []
    pair.check_job("job", prompt_of(150))
    pair.audit(imports=1)


def _is_probe(path: Path, pair: Pair) -> bool:
    """Whether the file is one that the decode node holds open."""
    return path in slabs_of(pair.decode.process.pid)


def test_auto_follows_the_side_that_says_tcp(world: World) -> None:
    pair = world.pair(decode=(*PREFETCH, *TCP))
    assert plane_of(pair) == "tcp"
    pair.check_job("job", prompt_of(150))
    pair.audit(imports=1)


@pytest.mark.parametrize(("ours", "theirs"), [(SHM, TCP), pytest.param(TCP, SHM, marks=pytest.mark.nightly)])
def test_two_planes_that_do_not_fit_are_refused_with_both_names_and_what_to_do(
    world: World, ours: tuple, theirs: tuple
) -> None:
    prefill = world.prefill(*ours)
    decode = world.launch("decode_node", *REMOTE, *theirs, "--pd-prefill-worker", prefill.endpoint)
    refused = world.wait_for_log(decode, "hello.refused")
    for part in (ours[1], theirs[1], "start both with the same --kv-plane"):
        assert part in refused["detail"]
    assert world.exit_of(decode) == 3
    world.stop(prefill)


def test_a_fixed_port_is_the_one_that_is_bound_and_comes_back(world: World) -> None:
    [port] = free_ports(1, "127.0.0.1")
    pair = world.pair((*TCP, "--kv-port", str(port)), (*PREFETCH, *TCP))
    assert listening_ports(pair.prefill) == {port}
    pair.check_job("job", prompt_of(150))
    world.kill(pair.decode)
    ended = world.wait_for_log(pair.prefill, "session.ended")
    world.wait(lambda: listening_ports(pair.prefill) == set(), f"the port is free again: {ended}")
    decode = world.decode(pair.prefill, *PREFETCH, *TCP)
    pair = Pair(world, pair.prefill, decode)
    world.wait_for_log(decode, "session.opened")
    assert listening_ports(pair.prefill) == {port}
    pair.check_job("again", prompt_of(150))
    pair.audit(imports=1)


@pytest.mark.nightly
def test_a_port_that_somebody_else_has_is_passed_over(world: World) -> None:
    [port] = free_ports(1, "127.0.0.1")
    first = world.prefill(*TCP, bind=f"tcp://127.0.0.1:{port}")
    second = world.prefill(*TCP, "--kv-port", str(port))
    decode = world.decode(second, *PREFETCH, *TCP)
    world.wait_for_log(decode, "session.opened")
    [bound] = listening_ports(second)
    assert port < bound < port + 64
    Pair(world, second, decode).audit(imports=0)
    world.stop(first)


@pytest.mark.nightly
def test_many_jobs_at_once_share_slots_and_socket(world: World) -> None:
    flags = ("--pd-remote-only", "--pd-prefetch-next", "3")
    pair = world.pair((*TCP, "--source-slots", "4"), (*flags, *TCP))
    jobs = [prompt_of(length, 20 + length) for length in (5, 400, 130, 256, 257, 31, 90, 600)]
    answers = [
        pair.client.submit(f"{number}", ids, max_tokens=6, ignore_eos=True) for number, ids in enumerate(jobs)
    ]
    for number in (1, 4):
        pair.client.cancel(f"{number}")
    for number, (ids, answer) in enumerate(zip(jobs, answers, strict=True)):
        world.end_of(answer)
        whole = expected(ids, 6, ignore_eos=True)
        if number in (1, 4):
            assert answer.token_ids == whole[: len(answer.token_ids)]
        else:
            assert answer.token_ids == whole
    pair.audit()
