"""KV and its record on their way: what is corrupt is refused, and no token comes from it."""

import json

from tests.process.world import PREFETCH, Pair, World, expected, prompt_of

# A is one chunk; corruption behind the first of many would reach the logits as well.
A, B, LONG = prompt_of(100, 14), prompt_of(130, 15), prompt_of(400, 17)
SECRET = list(b"correcthorsebatterystaple")


def test_corrupt_kv_fails_its_job_and_leaves_nothing_in_the_lane(shared_pair: Pair) -> None:
    before = shared_pair.counts()
    shared_pair.prefill.spoil("prefill.computed", "corrupt")
    answer = shared_pair.run("A", A, max_tokens=9)
    assert (answer.code, answer.end.definite) == ("KV_CORRUPT", False)
    # Its logits were good, so its first token may be out already; not one was made from the copy.
    assert answer.token_ids in ([], expected(A, 1))
    shared_pair.check_job("A", A)
    shared_pair.check_job("B", B)
    shared_pair.check_counts(before, kv_refused=1, remote_imports=2, jobs_failed=1)


def test_corrupt_kv_is_computed_again_locally_with_the_same_tokens(world: World) -> None:
    pair = world.pair(decode=("--on-prefill-failure", "local"))
    pair.prefill.spoil("prefill.computed", "corrupt")
    answer = pair.run("A", A, max_tokens=20)
    assert answer.end.path == "local"
    assert answer.token_ids == expected(A, 20), "the token that was out already must be kept, once"
    assert answer.end.usage.completion_tokens == len(answer.token_ids)
    assert pair.check_job("B", B).end.path == "remote"
    pair.audit(imports=1, local_tokens=len(A))


def test_one_corrupt_chunk_of_many_is_found(shared_pair: Pair) -> None:
    before = shared_pair.counts()
    shared_pair.prefill.spoil("prefill.computed", "corrupt")
    answer = shared_pair.run("LONG", LONG, max_tokens=9)
    assert answer.code == "KV_CORRUPT"
    # The producer looks again at what its logits came from, so not even the first token is out.
    assert answer.token_ids == []
    shared_pair.check_job("LONG", LONG)
    shared_pair.check_counts(before, kv_refused=1, remote_imports=1)


def test_a_job_that_ends_at_its_first_token_needs_no_kv(shared_pair: Pair) -> None:
    before = shared_pair.counts()
    shared_pair.prefill.spoil("prefill.computed", "corrupt")
    shared_pair.check_job("A", A, max_tokens=1)
    shared_pair.check_job("B", B)
    shared_pair.check_counts(before, kv_refused=0, remote_imports=1, prefills_done=2)


def test_prompts_and_answers_are_not_logged(world: World) -> None:
    pair = world.pair(("--log-level", "debug"), (*PREFETCH, "--log-level", "debug"))
    text = bytes(SECRET).decode()
    answer = pair.client.submit_body("A", prompt=text, sampling={"max_tokens": 30})
    world.end_of(answer)
    assert answer.token_ids == expected(SECRET, 30)
    refused = pair.client.submit_body("B", prompt=text, sampling={"max_tokens": 0})
    assert world.end_of(refused).code == "INVALID_SAMPLING"
    pair.prefill.spoil("prefill.chunk", "fail")
    failed = pair.client.submit_body("C", prompt=text)
    assert world.end_of(failed).code == "PREFILL_ERROR"
    pair.audit(imports=1)
    for daemon in (pair.prefill, pair.decode):
        written = json.dumps(daemon.entries)
        assert len(daemon.entries) > 5
        assert text not in written
        assert answer.text not in written
        assert ", ".join(str(token_id) for token_id in SECRET[:6]) not in written


def test_prompt_lengths_around_chunks_and_the_limit_give_the_same_tokens(world: World) -> None:
    pair = world.pair(("--max-tokens", "400"), (*PREFETCH, "--max-tokens", "400"))
    lengths = (1, 2, 127, 128, 129, 255, 256, 257, 392, 399)
    answers = {}
    for length in lengths:
        prompt_ids = prompt_of(length, length)
        answers[length] = pair.client.submit(f"{length}", prompt_ids, max_tokens=min(8, 400 - length))
    for length, answer in answers.items():
        world.end_of(answer)
        assert answer.token_ids == expected(prompt_of(length, length), min(8, 400 - length)), length
        assert answer.end.usage.prompt_tokens == length
    ends_at_first = sum(len(answer.token_ids) == 1 for answer in answers.values())
    pair.audit(imports=len(lengths) - ends_at_first)
