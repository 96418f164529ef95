"""A few cells of the matrix with the real model: a fault in one job never shows in another's tokens.

Half of them run on every change, all of them at night (`pytest -m "nightly or not nightly"`).
One prefetching, remote-only pair serves all of them. The right tokens are those of the same pair
undisturbed; that these are `generate()`'s is shown elsewhere.
"""

import os
from collections.abc import Iterator

import pytest

from common.engines.hf_tokenizer import HuggingFaceTokenizer
from common.engines.model_fetch import fetch_named_model
from tests.equivalence.test_torch_engine import TEXT
from tests.process.harness import START_MS
from tests.process.matrix import EXPECTED, Cause, Cell, Place, name_of
from tests.process.matrix_scene import SUBJECT_TOKENS, Jobs, Scene, play_on
from tests.process.world import PREFETCH, Pair, World

pytestmark = pytest.mark.real_model

COMPANION_TOKENS = 80
MODEL = ("--backend", "torch", "--max-tokens", "256", "--stall-ms", "120000")
# A CPU each, where there are two: threads of both engines would wait for each other.
CPUS = sorted(os.sched_getaffinity(0))
# The lease of a client that waits for a busy machine.
PATIENCE = ("--suspect-ms", "1500", "--dead-after-ms", "3000", "--lease-ms", "20000")
PREFILL_FLAGS = (*MODEL, *PATIENCE, "--chunk-tokens", "64", "--cpus", str(CPUS[0]))
DECODE_FLAGS = (*MODEL, *PATIENCE, "--cpus", str(CPUS[-1]))
CELLS: list[Cell] = [
    (Place.PREFILLING, Cause.PREFILL_ERROR),
    (Place.IMPORTING, Cause.CANCEL),
    (Place.IMPORTING, Cause.PREFILL_STOPPED),
]
NIGHTLY: list[Cell] = [
    (Place.PREFILLING, Cause.CANCEL),
    (Place.PREFILLED, Cause.LEAVE),
    (Place.DECODING, Cause.CANCEL),
]


@pytest.fixture(scope="module")
def pair(shared_world: World) -> Iterator[Pair]:
    pair = shared_world.pair(prefill=PREFILL_FLAGS, decode=(*PREFETCH, *DECODE_FLAGS))
    yield pair
    pair.audit()


@pytest.fixture(scope="module")
def jobs(pair: Pair) -> Jobs:
    """Three prompts and what this pair makes of them when nothing happens."""
    ids = HuggingFaceTokenizer(fetch_named_model(lambda *_: None).directory).encode(TEXT * 6)
    companion, subject, following = ids[:20], ids[40:180], ids[200:290]
    known = {}
    for prompt_ids, count in (
        (companion, COMPANION_TOKENS),
        (subject, SUBJECT_TOKENS),
        (following, SUBJECT_TOKENS),
    ):
        answer = pair.client.submit("undisturbed", prompt_ids, max_tokens=count, ignore_eos=True)
        pair.world.end_of(answer, START_MS)
        assert len(answer.token_ids) == count, answer.end
        known[tuple(prompt_ids)] = answer.token_ids
    return Jobs(
        companion=companion,
        subject=subject,
        following=following,
        answer=lambda prompt_ids, count: known[tuple(prompt_ids)][:count],
        companion_tokens=COMPANION_TOKENS,
        prefill_flags=PREFILL_FLAGS,
        decode_flags=DECODE_FLAGS,
    )


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_a_fault_in_a_state_has_its_one_right_answer_with_the_real_model(
    pair: Pair, jobs: Jobs, cell: Cell
) -> None:
    place, cause = cell
    play_on(Scene(pair, place, cause, jobs), EXPECTED[cause][place])


@pytest.mark.nightly
@pytest.mark.parametrize("cell", NIGHTLY, ids=name_of)
def test_other_faults_in_other_states_have_theirs(pair: Pair, jobs: Jobs, cell: Cell) -> None:
    place, cause = cell
    play_on(Scene(pair, place, cause, jobs), EXPECTED[cause][place])
