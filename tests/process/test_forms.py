"""Prefill nodes that write KV in another form, or answer no logits, beside a decode node of the usual form.

The emulated decode engine reads every byte of a lane, so a conversion that is missing, wrong or done twice
changes the tokens.
"""

import pytest

from common.messages import Finished
from tests.process.world import PREFETCH, World, expected, prompt_of

FORMS = {
    "interleaved": ("--emulated-rope-form", "interleaved"),
    "heads": ("--emulated-heads-reversed",),
    "no logits": ("--emulated-no-logits",),
    "all": ("--emulated-rope-form", "interleaved", "--emulated-heads-reversed", "--emulated-no-logits"),
}
LENGTHS = (1, 2, 127, 128, 129, 300)


@pytest.mark.parametrize(("form", "plane"), [*zip(FORMS, ["shm", "tcp", "shm", "tcp"], strict=True)])
def test_kv_of_another_form_leads_to_the_same_tokens(world: World, form: str, plane: str) -> None:
    pair = world.pair((*FORMS[form], "--kv-plane", plane), PREFETCH)
    prompts = [prompt_of(length, 3) for length in LENGTHS]
    for max_tokens in (1, 6):
        answers = [
            pair.client.submit(f"{len(ids)}-{max_tokens}", ids, max_tokens=max_tokens, ignore_eos=True)
            for ids in prompts
        ]
        for ids, answer in zip(prompts, answers, strict=True):
            assert isinstance(world.end_of(answer).end, Finished), answer.end
            assert answer.token_ids == expected(ids, max_tokens, ignore_eos=True)
    converted = [entry for entry in pair.decode.entries if entry["event"] == "kv.converted"]
    assert len(converted) == (form != "no logits")
    # Without logits every job takes the lane, and a prompt of one token leaves nothing to prefill elsewhere.
    logits = form in ("interleaved", "heads")
    imports = len(prompts) if logits else 2 * (len(prompts) - 1)
    counters = world.status(pair.decode)["counters"]
    assert counters["remote_imports"] == imports
    assert counters["local_prefill_tokens"] == (0 if logits else 2)


def test_without_logits_a_known_prompt_is_still_handed_over_one_token_short(world: World) -> None:
    pair = world.pair(
        ("--emulated-no-logits", "--prefix-cache-mb", "8"),
        (*PREFETCH, "--prefix-cache-mb", "8"),
    )
    ids = prompt_of(200, 4)
    for number in range(2):
        answer = pair.client.submit(f"{number}", ids, max_tokens=8, ignore_eos=True)
        assert isinstance(world.end_of(answer).end, Finished), answer.end
        assert answer.token_ids == expected(ids, 8, ignore_eos=True)
    # 199 tokens are handed over: 12 whole blocks of them are known the second time.
    assert answer.end.usage.cached_tokens_decode == 192
