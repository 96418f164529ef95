"""Many lanes: whatever the others do, a lane's tokens are those of its job alone.

Jobs are admitted and finish in random order, imported, prefilled in the lane, or continued behind a prefix,
with decode steps of the others in between. Lanes that are free and positions behind a lane's end hold NaN
(or bytes of no meaning), which any stray read would spread. In a batch a sum may differ in its last bits from
that of one lane alone, so another token is permitted where the two best logits are closer than `TIE`.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.engines import lane_batch, slab_cache
from common.engines.emulated import EmulatedDecodeEngine, EmulatedPrefillEngine
from common.engines.model_fetch import fetch_named_model
from common.engines.registry import EngineSettings
from common.engines.torch_engine import TorchDecodeEngine
from common.errors import ConfigError, InvariantViolation
from common.kv_layout import chunk_bounds
from tests.equivalence.test_torch_engine import hand_over, make_pair, prefill_in, settings_of, write_model
from tests.oracle import expected_tokens

TIE = 1e-3
WAYS = ("imported", "local", "prefix")


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt, how its KV comes into the lane, and how many tokens it wants."""

    prompt: np.ndarray
    way: str
    token_count: int


def poison(pair: SimpleNamespace, lane: int) -> None:
    """Empty a lane and leave NaN in it."""
    pair.decode.set_length(lane, 0)
    pair.decode.write_kv(lane, 0, 0, pair.poison)


def with_poison(pair: SimpleNamespace) -> SimpleNamespace:
    """A pair whose decode lanes are free, and hold what no computation may read."""
    bytes_of_nan = np.full(pair.layout.slot_bytes, 0xFF, dtype=np.uint8)
    pair.poison = bytes_of_nan.view(pair.slots[0].dtype).reshape(pair.layout.shape)
    for lane in range(pair.decode.capabilities.lanes):
        poison(pair, lane)
    return pair


def fill(pair: SimpleNamespace, lane: int, job: Job) -> Iterator[np.ndarray | None]:
    """The work of bringing a prompt into a lane, piece by piece; the last gives the logits behind it."""
    prompt, chunk = job.prompt, pair.decode.capabilities.chunk_tokens
    first = 0
    if job.way == "imported":
        logits = prefill_in(pair.prefill, 0, prompt)
        hand_over(pair, 0, lane, len(prompt))
        yield logits
        return
    if job.way == "prefix":
        first = (len(prompt) - 1) // chunk * chunk
        prefill_in(pair.prefill, 0, prompt)
        pair.decode.write_kv(lane, 0, 0, pair.slots[0][:, :, :first])
        pair.decode.set_length(lane, first)
        yield None
    for start, end in chunk_bounds(first, len(prompt), chunk):
        yield pair.decode.prefill_chunk(lane, prompt, start, end)


class Crowd:
    """Jobs that share the lanes of one engine, in an order that a seed decides."""

    def __init__(self, pair: SimpleNamespace, jobs: list[Job], seed: int) -> None:
        self.pair = pair
        self.jobs = jobs
        self.random = random.Random(seed)
        self.waiting = self.random.sample(range(len(jobs)), len(jobs))
        self.free = list(range(pair.decode.capabilities.lanes))
        self.filling: dict[int, tuple[int, Iterator[np.ndarray | None]]] = {}
        self.running: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.widest = 0

    def run(self) -> list[list[int]]:
        """Tokens of each job."""
        while self.waiting or self.filling or self.running:
            turn = self.random.choice((self._admit, self._fill, self._step))
            turn()
        return [self.tokens[index] for index in range(len(self.jobs))]

    def _admit(self) -> None:
        if self.waiting and self.free:
            index = self.waiting.pop()
            lane = self.free.pop(self.random.randrange(len(self.free)))
            self.filling[lane] = index, fill(self.pair, lane, self.jobs[index])

    def _fill(self) -> None:
        for lane, (index, work) in list(self.filling.items()):
            logits = next(work)
            if logits is not None:
                del self.filling[lane]
                self.running[lane], self.tokens[index] = index, []
                self._take(lane, logits)

    def _step(self) -> None:
        lanes = self.random.sample(sorted(self.running), len(self.running))
        if not lanes:
            return
        self.widest = max(self.widest, len(lanes))
        rows = self.pair.decode.step(lanes, [self.tokens[self.running[lane]][-1] for lane in lanes])
        for lane, row in zip(lanes, rows, strict=True):
            self._take(lane, row)

    def _take(self, lane: int, logits: np.ndarray) -> None:
        assert np.isfinite(logits).all()
        index = self.running[lane]
        self.tokens[index].append(int(logits.argmax()))
        if len(self.tokens[index]) == self.jobs[index].token_count:
            del self.running[lane]
            poison(self.pair, lane)
            self.free.append(lane)


def alone(pair: SimpleNamespace, job: Job) -> tuple[list[int], list[float]]:
    """Tokens of a job that has the engine for itself, and by how much each was the best."""
    tokens, margins = [], []
    for logits in fill(pair, 0, job):
        if logits is not None:
            break
    while True:
        second, best = np.partition(logits, -2)[-2:]
        tokens.append(int(logits.argmax()))
        margins.append(float(best - second))
        if len(tokens) == job.token_count:
            poison(pair, 0)
            return tokens, margins
        logits = pair.decode.step([0], tokens[-1:])[0]


def ties(expected: tuple[list[int], list[float]], found: list[int]) -> int:
    """1 when the tokens part at a place that is too close to tell, 0 when they are equal; else it fails."""
    tokens, margins = expected
    assert len(found) == len(tokens)
    for position, (token, right) in enumerate(zip(found, tokens, strict=True)):
        if token != right:
            assert margins[position] < TIE, f"token {position} of {found} is not {right}"
            return 1
    return 0


def draw_jobs(seed: int, count: int, vocab_size: int, length_max: int, tokens_max: int) -> list[Job]:
    draw = np.random.default_rng(seed)
    return [
        Job(
            draw.integers(1, vocab_size, draw.integers(1, length_max + 1)),
            WAYS[index % len(WAYS)],
            int(draw.integers(1, tokens_max + 1)),
        )
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def real_pair() -> SimpleNamespace:
    files = fetch_named_model(lambda stage, done, total: None)
    return with_poison(make_pair(settings_of(files.directory, lanes=4)))


@pytest.mark.real_model
def test_tokens_in_a_crowd_are_those_of_the_job_alone(real_pair: SimpleNamespace) -> None:
    jobs = draw_jobs(1, 7, 40_000, 150, 9)
    expected = [alone(real_pair, job) for job in jobs]
    crowd = Crowd(real_pair, jobs, 1)
    parted = sum(ties(*pair) for pair in zip(expected, crowd.run(), strict=True))
    assert crowd.widest >= 3
    assert parted <= 1


@pytest.mark.real_model
def test_a_row_has_the_same_bits_whatever_its_neighbours_hold(real_pair: SimpleNamespace) -> None:
    prompt = np.arange(500, 590)

    def bits_beside(neighbour: np.ndarray | None) -> bytes:
        prefill_in(real_pair.decode, 0, prompt)
        if neighbour is None:  # one that decodes garbage: its logits are NaN, and only its own
            real_pair.decode.set_length(1, 70)
        else:
            prefill_in(real_pair.decode, 1, neighbour)
        rows = real_pair.decode.step([0, 1], [7, 8])
        assert np.isfinite(rows[0]).all()
        assert np.isfinite(rows[1]).all() == (neighbour is not None)
        poison(real_pair, 0)
        poison(real_pair, 1)
        return rows[0].tobytes()

    beside = {bits_beside(neighbour) for neighbour in (prompt[:1], prompt[::-1].copy(), None)}
    assert len(beside) == 1


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("small") / "model", "llama")


def small_pair(directory: Path, lanes: int, **others: object) -> SimpleNamespace:
    return with_poison(
        make_pair(settings_of(directory, max_tokens=64, chunk_tokens=8, lanes=lanes, **others))
    )


@pytest.mark.parametrize("lanes", [2, 5, 8, 12])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_number_of_lanes_gives_the_tokens_of_each_job_alone(
    small_model: Path, lanes: int, dtype: str
) -> None:
    pair = small_pair(small_model, lanes, dtype=dtype)
    jobs = draw_jobs(lanes, 4 * lanes, 64, 40, 20)
    expected = [alone(pair, job) for job in jobs]
    crowd = Crowd(pair, jobs, lanes)
    found = crowd.run()
    assert crowd.widest >= 2 * lanes // 3
    # bfloat16 has no logits between 1 and 1.008: what is a tie there is decided by more than TIE.
    if dtype == "float32":
        assert sum(ties(*pair) for pair in zip(expected, found, strict=True)) == 0
    else:
        assert sum(own == tokens for (own, _), tokens in zip(expected, found, strict=True)) > len(jobs) / 2


@pytest.mark.parametrize("model_type", ["qwen3", "phi3", "gptj"])
def test_other_families_decode_in_several_lanes(tmp_path: Path, model_type: str) -> None:
    others = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 96}
    fields = {"num_key_value_heads": 4, **others} if model_type == "gptj" else {}
    pair = small_pair(write_model(tmp_path / "model", model_type, **fields), 3)
    jobs = draw_jobs(5, 9, 64, 40, 20)
    expected = [alone(pair, job) for job in jobs]
    found = Crowd(pair, jobs, 5).run()
    assert sum(ties(*pair) for pair in zip(expected, found, strict=True)) == 0


def test_a_step_reads_each_lane_to_its_end_and_no_other_lane(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = small_pair(small_model, 6)
    for lane, length in ((1, 30), (4, 3), (5, 17)):
        prefill_in(pair.decode, lane, np.arange(1, 1 + length))
    read, attend = [], torch.nn.functional.scaled_dot_product_attention

    def watched(query: torch.Tensor, key: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        read.append(key.shape[2])
        return attend(query, key, *args, **kwargs)

    monkeypatch.setattr(slab_cache.torch.nn.functional, "scaled_dot_product_attention", watched)
    pair.decode.step([4, 1], [5, 6])
    assert read == [4, 31] * pair.layout.layers


def test_a_lane_that_is_full_takes_no_part_in_a_step(small_model: Path) -> None:
    pair = small_pair(small_model, 2)
    prefill_in(pair.decode, 0, np.arange(1, 10))
    prefill_in(pair.decode, 1, np.resize(np.arange(1, 60), 64))
    before = pair.decode.read_kv(0, 0, 2, 0, 9)
    with pytest.raises(InvariantViolation, match="room"):
        pair.decode.step([0, 1], [5, 5])
    assert np.array_equal(pair.decode.read_kv(0, 0, 2, 0, 9), before)
    with pytest.raises(InvariantViolation, match="shorter"):
        pair.decode.read_kv(0, 0, 2, 0, 10)


def test_a_model_that_cannot_decode_in_several_lanes_is_refused_at_load(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(small_model, max_tokens=64, chunk_tokens=8, lanes=2)
    update = lane_batch.LanesLayer.update

    def forgetful(*args: object, **kwargs: object) -> tuple[lane_batch.LaneViews, ...]:
        """The last position of each lane alone."""
        both = update(*args, **kwargs)
        return tuple(lane_batch.LaneViews(view[:, :, -1:] for view in views) for views in both)

    monkeypatch.setattr(lane_batch.LanesLayer, "update", forgetful)
    with pytest.raises(ConfigError, match="decoding several lanes changes its logits"):
        TorchDecodeEngine(settings)
    monkeypatch.setattr(lane_batch.LanesLayer, "update", None)
    with pytest.raises(ConfigError, match="cannot decode this model in several lanes"):
        TorchDecodeEngine(settings)
    assert TorchDecodeEngine(settings_of(small_model, max_tokens=64, lanes=1)).capabilities.chunk_us > 0


@pytest.mark.parametrize("form", [{}, {"emulated_rope_form": "interleaved", "emulated_heads_reversed": True}])
@pytest.mark.parametrize("lanes", [2, 8, 64])
def test_emulated_lanes_give_the_tokens_of_the_oracle(lanes: int, form: dict) -> None:
    settings = EngineSettings(
        backend="emulated",
        model="",
        max_tokens=160,
        chunk_tokens=16,
        lanes=lanes,
        emulated_prefill_tokens_per_s=float("inf"),
        emulated_decode_ms=0.0,
        **form,
    )
    prefill, decode = EmulatedPrefillEngine(settings), EmulatedDecodeEngine(settings)
    layout = decode.capabilities.layout
    slots = [np.zeros(layout.shape, dtype=np.uint8)]
    prefill.attach([memoryview(slot).cast("B") for slot in slots])
    pair = with_poison(SimpleNamespace(prefill=prefill, decode=decode, slots=slots, layout=layout))
    jobs = draw_jobs(lanes, 80, 256, 60, 24)
    crowd = Crowd(pair, jobs, lanes)
    found = crowd.run()
    assert crowd.widest >= min(lanes, 8)
    for job, tokens in zip(jobs, found, strict=True):
        assert tokens == expected_tokens(job.prompt.tolist(), job.token_count, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
