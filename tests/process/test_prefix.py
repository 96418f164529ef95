"""Prefix caches of real daemons, on both data planes: hits, bytes on the wire, ends, and saved files.

The emulated model's tokens change when one byte of KV is wrong, so equal tokens mean equal KV. The borders of
blocks and chunks, and every state, are gone through in `tests/unit/test_prefix_cache.py`.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from common.messages import Finished
from tests.process.harness import ROOT
from tests.process.test_tcp_faults import Relayed
from tests.process.world import PREFETCH, REMOTE, Answer, Pair, World, expected, prompt_of
from transport.client import Client

CACHE = ("--prefix-cache-mb", "64")
BLOCK = 16
TOKEN_BYTES = 4 * 2 * 2 * 8  # layers, K and V, heads, bytes of a head
PLANES = ("shm", "tcp")
PROMPT = prompt_of(300, 3)
KNOWN = len(PROMPT) // BLOCK * BLOCK
HITS = {
    "neither": ((), ()),
    "decode": ((), CACHE),
    "prefill": (CACHE, ()),
    "both": (CACHE, CACHE),
}

every_plane = pytest.mark.parametrize("plane", PLANES)


def cached_pair(world: World, plane: str = "shm", hits: str = "both", *decode: str) -> Pair:
    prefill_cache, decode_cache = HITS[hits]
    flags = ("--kv-plane", plane)
    return world.pair((*flags, *prefill_cache), (*(decode or PREFETCH), *flags, *decode_cache))


def check_usage(answer: Answer, decode: int, prefill: int) -> None:
    usage = answer.end.usage
    assert (usage.cached_tokens_decode, usage.cached_tokens_prefill) == (decode, prefill)


def check_unlocked(pair: Pair) -> None:
    """Nothing is locked, in neither node's cache."""
    pair.wait_clean()
    for daemon in (pair.decode, pair.prefill):
        status = pair.world.status(daemon)["prefix_cache"]
        if status is not None:
            assert (status["locks"], status["pinned"]) == (0, 0)


@every_plane
@pytest.mark.parametrize("prefetch", [PREFETCH, REMOTE], ids=["prefetch", "no prefetch"])
@pytest.mark.parametrize("hits", HITS)
def test_jobs_that_begin_alike_have_the_tokens_that_they_would_have_without_a_cache(
    world: World, plane: str, prefetch: tuple[str, ...], hits: str
) -> None:
    pair = cached_pair(world, plane, hits, *prefetch)
    first = pair.check_job("first", PROMPT, 40)
    check_usage(first, 0, 0)
    prompts = {str(tail): PROMPT[: len(PROMPT) - 5] + prompt_of(tail, tail) for tail in (1, 21, 133)}
    answers = {
        label: pair.client.submit(label, ids, max_tokens=9, ignore_eos=True) for label, ids in prompts.items()
    }
    gone = pair.client.submit("gone", PROMPT, max_tokens=50)
    pair.client.cancel("gone")
    for label, ids in prompts.items():
        assert world.end_of(answers[label]).token_ids == expected(ids, 9, ignore_eos=True)
        known = (len(PROMPT) - 5) // BLOCK * BLOCK
        check_usage(
            answers[label],
            known if hits in ("decode", "both") else 0,
            known if hits in ("prefill", "both") else 0,
        )
    assert world.end_of(gone).code == "CANCELLED"
    check_unlocked(pair)
    pair.audit()


@every_plane
def test_when_the_producer_fails_the_next_job_still_finds_what_was_known(world: World, plane: str) -> None:
    pair = cached_pair(world, plane)
    pair.check_job("first", PROMPT)
    pair.prefill.spoil("prefill.chunk", "fail")
    failed = pair.run("failed", PROMPT + PROMPT[:30], max_tokens=8)
    assert failed.code == "PREFILL_ERROR"
    check_unlocked(pair)
    check_usage(pair.check_job("next", PROMPT + PROMPT[:30]), KNOWN, KNOWN)
    pair.audit()


def test_nothing_but_the_suffix_goes_over_the_wire(world: World) -> None:
    relayed = Relayed(world, *CACHE)
    try:
        relayed.pair.check_job("first", PROMPT)
        before = carried_bytes(relayed)
        assert before > len(PROMPT) * TOKEN_BYTES
        relayed.pair.check_job("second", PROMPT + PROMPT[:30])
        suffix_bytes = (len(PROMPT) + 30 - KNOWN) * TOKEN_BYTES
        # The rest is what the pieces are wrapped in, and credit.
        assert 0 <= carried_bytes(relayed) - before - suffix_bytes < BLOCK * TOKEN_BYTES
    finally:
        relayed.relay.leave()


def carried_bytes(relayed: Relayed) -> int:
    """Of all bulk connections, both ways."""
    return sum(relayed.relay.carried[port] for port in relayed.bulk)


@every_plane
def test_the_next_turn_of_a_chat_finds_the_last_answer(world: World, plane: str) -> None:
    pair = cached_pair(world, plane)
    answer = pair.run("first", PROMPT, max_tokens=60, ignore_eos=True)
    turn = PROMPT + answer.token_ids + prompt_of(20, 5)
    known = (len(PROMPT) + 60 - 1) // BLOCK * BLOCK
    check_usage(pair.check_job("second", turn), known, KNOWN)


def test_a_stop_string_ends_a_job_whose_answer_is_kept(world: World) -> None:
    pair = cached_pair(world)
    whole = expected(PROMPT, 60, ignore_eos=True)
    stop = bytes(whole[40:44]).decode()
    stopped = pair.run("first", PROMPT, max_tokens=60, ignore_eos=True, stop=[stop])
    assert isinstance(stopped.end, Finished)
    assert stopped.end.reason == "stop"
    again = pair.check_job("second", PROMPT + whole[:50])
    assert again.end.usage.cached_tokens_decode > KNOWN
    check_unlocked(pair)


@pytest.mark.parametrize("scope", ["shared", "client"])
def test_clients_share_prompts_only_where_the_operator_lets_them(world: World, scope: str) -> None:
    pair = cached_pair(world, "shm", "both", *PREFETCH, "--prefix-cache-scope", scope)
    pair.check_job("first", PROMPT)
    other = world.client(pair.decode)
    answer = world.end_of(other.submit("second", PROMPT, max_tokens=12))
    assert answer.token_ids == expected(PROMPT, 12)
    known = KNOWN if scope == "shared" else 0
    check_usage(answer, known, known)


def test_jobs_of_another_salt_share_nothing(world: World) -> None:
    pair = cached_pair(world)
    for label, salt, known in (("a", "one", 0), ("b", "two", 0), ("c", None, 0), ("d", "one", KNOWN)):
        body = {"prompt_ids": PROMPT, "sampling": {"max_tokens": 12}, "cache_salt": salt}
        answer = world.end_of(pair.client.submit_body(label, **body))
        assert answer.token_ids == expected(PROMPT, 12)
        check_usage(answer, known, known)


def test_a_lost_prefill_node_is_replaced_and_the_decode_side_keeps_what_it_knows(world: World) -> None:
    pair = cached_pair(world, "shm", "both", *REMOTE, "--on-prefill-failure", "retry")
    pair.check_job("first", PROMPT)
    pair.prefill.hold("prefill.chunk")
    answer = pair.client.submit("second", PROMPT + PROMPT[:30], max_tokens=12)
    world.wait_held(pair.prefill, "prefill.chunk")
    world.kill(pair.prefill)
    pair.prefill = world.prefill(*CACHE, "--kv-plane", "shm", name="again", bind=pair.prefill.endpoint)
    assert world.end_of(answer).token_ids == expected(PROMPT + PROMPT[:30], 12)
    check_usage(answer, KNOWN, 0)
    check_unlocked(pair)


def test_without_a_prefill_node_only_what_is_not_known_is_computed(world: World) -> None:
    decode = world.decode(None, *CACHE)
    pair = Pair(world, decode, decode)
    pair.check_job("first", PROMPT)
    answer = pair.check_job("second", PROMPT + PROMPT[:30])
    assert answer.end.path == "local"
    check_usage(answer, KNOWN, 0)
    counters = world.status(decode)["counters"]
    assert counters["local_prefill_tokens"] == len(PROMPT) + len(PROMPT) + 30 - KNOWN


def test_a_cache_of_few_blocks_stays_as_small_and_gives_the_right_tokens(world: World) -> None:
    small = ("--prefix-cache-mb", "1", "--prefix-block-tokens", "512")
    pair = world.pair(small, (*PREFETCH, *small))
    for number in range(12):
        pair.check_job(f"job{number}", prompt_of(530, number % 5), 3)
    status = world.status(pair.decode)["prefix_cache"]
    assert status["places"] == 2**20 // (512 * TOKEN_BYTES)
    assert status["blocks"] <= status["places"]
    pair.audit()


def run_cache(*arguments: str) -> tuple[int, str, str]:
    """`scripts/cache.py` as a person runs it: exit status, output, errors."""
    command = [sys.executable, str(ROOT / "scripts" / "cache.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def saving_pair(world: World, *decode: str) -> Pair:
    directory = world.directory / "saved"
    directory.mkdir(exist_ok=True)
    return cached_pair(
        world, "shm", "both", *PREFETCH, "--prefix-cache-dir", str(directory), "--lease-ms", "60000", *decode
    )


def test_a_saved_cache_is_found_again_by_the_next_process(world: World) -> None:
    pair = saving_pair(world)
    pair.check_job("first", PROMPT)
    status, output, errors = run_cache("save", "chat", "--endpoint", pair.decode.endpoint)
    path = world.directory / "saved" / "chat"
    assert (status, errors) == (0, "")
    assert output.startswith("saved 19 blocks: ")
    assert str(path) in output

    status, output, _ = run_cache("info", str(path))
    assert status == 0
    assert "19 blocks, 304 tokens" in output
    assert "block_tokens: 16" in output

    decode = world.decode(pair.prefill.endpoint, *REMOTE, *CACHE, "--prefix-cache-dir", str(path.parent))
    world.stop(pair.decode)
    status, output, _ = run_cache("load", "chat", "--endpoint", decode.endpoint)
    assert (status, output.startswith("loaded 19 blocks: ")) == (0, True)
    fresh = Pair(world, pair.prefill, decode)
    check_usage(fresh.check_job("second", PROMPT + PROMPT[:30]), KNOWN, KNOWN)
    check_unlocked(fresh)


def test_a_save_while_jobs_decode_changes_no_token(world: World) -> None:
    pair = saving_pair(world, "--emulated-decode-ms", "5")
    pair.check_job("first", PROMPT)
    answer = pair.client.submit("second", PROMPT + PROMPT[:30], max_tokens=100, ignore_eos=True)
    world.wait(lambda: answer.token_ids, "it decodes")
    with Client(pair.decode.endpoint) as client:
        replies = [client.order_cache("save", "chat", 10_000), client.order_cache("load", "chat", 10_000)]
    assert [reply.code for reply in replies] == [None, None]
    assert answer.end is None, "the job had ended before the save"
    assert world.end_of(answer).token_ids == expected(PROMPT + PROMPT[:30], 100, ignore_eos=True)
    check_unlocked(pair)


@pytest.mark.parametrize("content", [b"", b"tandem prefix\r\n\x1a", b"something else", b"\0" * 500])
def test_a_file_that_is_no_cache_is_refused_by_name(world: World, content: bytes) -> None:
    pair = saving_pair(world)
    path = world.directory / "saved" / "chat"
    path.write_bytes(content)
    status, output, errors = run_cache("load", "chat", "--endpoint", pair.decode.endpoint)
    assert (status, output) == (1, "")
    assert str(path) in errors
    status, _, errors = run_cache("info", str(path))
    assert status == 2
    assert str(path) in errors


def test_a_file_of_other_blocks_is_refused(world: World) -> None:
    pair = saving_pair(world)
    pair.check_job("first", PROMPT)
    run_cache("save", "chat", "--endpoint", pair.decode.endpoint)
    directory = str(world.directory / "saved")
    flags = (*CACHE, "--prefix-cache-dir", directory, "--prefix-block-tokens", "8")
    other = world.decode(None, *flags)
    status, _, errors = run_cache("load", "chat", "--endpoint", other.endpoint)
    assert status == 1
    assert "block_tokens: 16 in the file, 8 here" in errors


def test_the_script_says_what_is_missing(world: World) -> None:
    pair = cached_pair(world, "shm", "both", *REMOTE, "--lease-ms", "60000")
    endpoint = pair.decode.endpoint
    status, _, errors = run_cache("save", "chat", "--endpoint", endpoint)
    assert (status, "--prefix-cache-dir" in errors) == (1, True)
    status, _, errors = run_cache("save", "../chat", "--endpoint", endpoint)
    assert (status, "plain name" in errors) == (1, True)
    status, _, errors = run_cache("save", "chat", "--endpoint", pair.prefill.endpoint)
    assert status == 1
    status, _, errors = run_cache("save", "chat", "--endpoint", f"ipc://{world.directory}/nobody")
    assert (status, "--endpoint" in errors) == (1, True)
    status, _, errors = run_cache("info", str(Path(world.directory) / "nothing"))
    assert (status, "cache: " in errors) == (2, True)
