"""The emulated model against its oracle.

Decides whether every KV byte counts and whether both roles agree, whatever the chunks, pieces, slots and
lanes. It must never use the engine's own hashing for an expected value: those come from `tests/oracle.py`.
"""

import dataclasses

import numpy as np
import pytest

from common.engines.byte_tokenizer import EOS
from common.engines.emulated import EmulatedDecodeEngine, EmulatedPrefillEngine
from common.engines.registry import EngineSettings, load_decode_engine, load_prefill_engine
from common.errors import InvariantViolation
from common.kv_layout import chunk_bounds
from tests.oracle import expected_tokens, oracle_kv, oracle_logits

CHUNK = 16
INSTANT = EngineSettings(
    "emulated",
    model="unused",
    max_tokens=320,
    chunk_tokens=CHUNK,
    emulated_prefill_tokens_per_s=float("inf"),
    emulated_decode_ms=0.0,
)


def prompt_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, 256, length)


def decode_engine(**changes):
    return EmulatedDecodeEngine(dataclasses.replace(INSTANT, **changes))


def prefill_engine(slot_count=1, fill=0, **changes):
    engine = EmulatedPrefillEngine(dataclasses.replace(INSTANT, **changes))
    slots = [bytearray([fill]) * engine.capabilities.layout.slot_bytes for _ in range(slot_count)]
    engine.attach([memoryview(slot) for slot in slots])
    return engine, slots


def prefill(engine, index, prompt, bounds=None):
    """Prefill a prompt into a slot or lane; the logits behind it."""
    answers = [
        engine.prefill_chunk(index, prompt, start, end)
        for start, end in bounds or chunk_bounds(0, len(prompt), CHUNK)
    ]
    assert all(logits is None for logits in answers[:-1])
    return answers[-1]


def generate(engine, lane, logits, count):
    """Greedy tokens, going on after EOS."""
    tokens = []
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        logits = engine.step([lane], tokens[-1:])[0]
    return tokens


def slot_array(engine, slot):
    return np.frombuffer(slot, dtype=np.uint8).reshape(engine.capabilities.layout.shape)


def load_lane(engine, lane, kv, token_count):
    """Import `[layer, 2, token, head, dim]` in pieces of one and two layers, cut at odd positions."""
    for layer, layer_end in ((0, 1), (1, 3), (3, 4)):
        for start, end in chunk_bounds(0, token_count, 7):
            engine.write_kv(lane, layer, start, kv[layer:layer_end, :, start:end])
    engine.set_length(lane, token_count)


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 300])
@pytest.mark.parametrize("seed", [0, 7])
def test_kv_logits_and_tokens_are_those_of_the_oracle(length, seed):
    prompt = prompt_of(length)
    producer, slots = prefill_engine(emulated_seed=seed)
    logits = prefill(producer, 0, prompt)
    assert logits.dtype == np.float32
    assert logits.tolist() == oracle_logits(prompt.tolist(), seed)
    kv = slot_array(producer, slots[0])[:, :, :length]
    assert kv.tobytes() == oracle_kv(prompt.tolist(), seed)

    engine = decode_engine(emulated_seed=seed)
    tokens = generate(engine, 0, prefill(engine, 0, prompt), 12)
    assert tokens == expected_tokens(prompt.tolist(), 12, seed, ignore_eos=True)


def test_step_into_an_empty_lane_is_a_prompt_of_one_token():
    engine = decode_engine()
    assert engine.step([0], [65])[0].tolist() == oracle_logits([65])


def test_chunk_schedule_does_not_matter():
    prompt = prompt_of(50)
    schedules = [[(0, 50)], [(0, 1), (1, 49), (49, 50)], [(at, at + 1) for at in range(50)]]
    results = []
    for bounds in schedules:
        engine, slots = prefill_engine()
        results.append((prefill(engine, 0, prompt, bounds).tolist(), bytes(slots[0])))
    assert results[0] == results[1] == results[2]


def test_slot_imported_in_pieces_decodes_like_local_prefill():
    prompt = prompt_of(45)
    producer, slots = prefill_engine()
    remote_logits = prefill(producer, 0, prompt)
    engine = decode_engine(lanes=2)
    local_logits = prefill(engine, 0, prompt)
    load_lane(engine, 1, slot_array(producer, slots[0]), 45)
    assert remote_logits.tolist() == local_logits.tolist()
    for token_id in generate(engine, 0, local_logits, 8):
        remote_logits = engine.step([1], [token_id])[0]
    assert remote_logits.tolist() == oracle_logits(
        prompt.tolist() + expected_tokens(prompt.tolist(), 8, ignore_eos=True)
    )


def test_write_kv_keeps_no_reference_to_the_piece():
    prompt = prompt_of(20)
    producer, slots = prefill_engine()
    prefill(producer, 0, prompt)
    engine = decode_engine()
    load_lane(engine, 0, slot_array(producer, slots[0]), 20)
    slots[0][:] = bytes(len(slots[0]))
    assert engine.step([0], [1])[0].tolist() == oracle_logits([*prompt.tolist(), 1])


@pytest.mark.parametrize("position", [0, 10, 20])
@pytest.mark.parametrize("key_or_value", [0, 1])
@pytest.mark.parametrize("layer", range(4))
def test_any_flipped_byte_changes_the_next_logits_and_those_after(layer, key_or_value, position):
    prompt = prompt_of(21)
    producer, slots = prefill_engine()
    prefill(producer, 0, prompt)
    good = slot_array(producer, slots[0])
    expected = [oracle_logits([*prompt.tolist(), *([1] * count)]) for count in (1, 2)]
    engine = decode_engine()
    for head in range(2):
        for byte in range(8):
            wrong = good.copy()
            wrong[layer, key_or_value, position, head, byte] ^= 1
            load_lane(engine, 0, wrong, 21)
            for right_logits in expected:
                logits = engine.step([0], [1])[0]
                assert np.mean(logits != np.float32(right_logits)) > 0.9


def test_foreign_position_in_a_lane_changes_the_logits():
    prompt = prompt_of(21)
    engine, slots = prefill_engine(slot_count=2)
    prefill(engine, 0, prompt)
    prefill(engine, 1, prompt_of(21, seed=1))
    mixed, foreign = (slot_array(engine, slot) for slot in slots)
    mixed[:, :, 5] = foreign[:, :, 5]
    consumer = decode_engine()
    load_lane(consumer, 0, mixed, 21)
    assert consumer.step([0], [1])[0].tolist() != oracle_logits([*prompt.tolist(), 1])


@pytest.mark.parametrize("position", [0, 15, 31])
def test_wrong_prefix_in_a_slot_spoils_the_suffix_computed_behind_it(position):
    prompt = prompt_of(40)
    engine, slots = prefill_engine()
    prefill(engine, 0, prompt, [(0, 32), (32, 40)])
    kv = slot_array(engine, slots[0])
    right_suffix = kv[:, :, 32:40].copy()
    assert prefill(engine, 0, prompt, [(32, 40)]).tolist() == oracle_logits(prompt.tolist())
    assert np.array_equal(kv[:, :, 32:40], right_suffix)
    kv[3, 1, position, 1, 7] ^= 1
    prefill(engine, 0, prompt, [(32, 40)])
    assert (kv[:, :, 32:40] != right_suffix).any(axis=-1).all()


def test_prefix_of_another_prompt_spoils_the_suffix():
    prompt = prompt_of(40)
    engine, slots = prefill_engine()
    prefill(engine, 0, prompt)
    right_suffix = slot_array(engine, slots[0])[:, :, 32:40].copy()
    other = prompt.copy()
    other[3] ^= 1
    prefill(engine, 0, other, [(0, 32), (32, 40)])
    prefill(engine, 0, prompt, [(32, 40)])
    assert (slot_array(engine, slots[0])[:, :, 32:40] != right_suffix).any(axis=-1).all()


def test_decode_written_kv_serves_as_a_prefix():
    prompt = prompt_of(20)
    engine = decode_engine()
    answer = generate(engine, 0, prefill(engine, 0, prompt), 10)
    longer = np.concatenate([prompt, answer, prompt_of(5, seed=2)])
    logits = engine.prefill_chunk(0, longer, 30, 35)
    assert logits.tolist() == oracle_logits(longer.tolist())


def test_bytes_beyond_the_length_do_not_matter():
    prompt = prompt_of(21)
    producer, slots = prefill_engine()
    prefill(producer, 0, prompt)
    kv = slot_array(producer, slots[0])
    kv[:, :, 21:] = 0xA5
    engine = decode_engine()
    load_lane(engine, 0, kv, 320)
    engine.set_length(0, 21)
    assert engine.step([0], [1])[0].tolist() == oracle_logits([*prompt.tolist(), 1])


@pytest.mark.parametrize("length", [1, 33])
def test_dirty_slot_and_lane_are_reused_cleanly(length):
    first, second = prompt_of(60), prompt_of(length, seed=1)
    producer, slots = prefill_engine(fill=0xFF)
    engine = decode_engine()
    for prompt in (first, second):
        logits = prefill(producer, 0, prompt)
        assert logits.tolist() == oracle_logits(prompt.tolist())
        load_lane(engine, 0, slot_array(producer, slots[0]), len(prompt))
        tokens = generate(engine, 0, logits, 4)
        assert tokens == expected_tokens(prompt.tolist(), 4, ignore_eos=True)
        engine.set_length(0, 0)


def test_lanes_and_slots_do_not_touch_each_other():
    prompts = [prompt_of(length, seed=length) for length in (5, 18, 33)]
    producer, _ = prefill_engine(slot_count=3)
    engine = decode_engine(lanes=3)
    rows = []
    for index, prompt in enumerate(prompts):
        prefill(producer, index, prompt)
        rows.append(prefill(engine, index, prompt))
    logits = engine.step([2, 0, 1], [1, 2, 3])
    assert logits.shape == (3, 259)
    for row, (lane, token_id) in zip(logits, [(2, 1), (0, 2), (1, 3)], strict=True):
        assert row.tolist() == oracle_logits([*prompts[lane].tolist(), token_id])


def test_slots_need_no_alignment():
    prompt = prompt_of(20)
    engine, _ = prefill_engine()
    payload = bytearray(engine.capabilities.layout.slot_bytes + 3)
    engine.attach([memoryview(payload)[3:]])
    assert prefill(engine, 0, prompt).tolist() == oracle_logits(prompt.tolist())
    assert payload[:3] == bytes(3)


def test_logits_are_finite_and_never_tied_and_answers_are_text_with_a_rare_end():
    engine = decode_engine(max_tokens=2001)
    logits = prefill(engine, 0, np.array([65]))
    counts = np.zeros(259, dtype=int)
    for _ in range(2000):
        assert np.isfinite(logits).all()
        assert len(np.unique(logits)) == 259
        counts[logits.argmax()] += 1
        logits = engine.step([0], [int(logits.argmax())])[0]
    letters = counts[ord("a") : ord("z") + 1]
    assert letters.min() > 20
    assert 100 < counts[ord(" ")] < 400
    assert 1 <= counts[EOS] < 30
    assert letters.sum() + counts[ord(" ")] + counts[EOS] == 2000


def test_positions_outside_slot_or_lane_are_our_bug():
    engine = decode_engine()
    with pytest.raises(InvariantViolation):
        engine.set_length(0, 321)
    with pytest.raises(InvariantViolation):
        engine.write_kv(0, 0, 320, np.zeros((4, 2, 1, 2, 8), dtype=np.uint8))
    with pytest.raises(InvariantViolation):
        engine.write_kv(0, 1, 0, np.zeros((4, 2, 1, 2, 8), dtype=np.uint8))
    engine.set_length(0, 320)
    with pytest.raises(InvariantViolation):
        engine.step([0], [1])
    producer, slots = prefill_engine()
    with pytest.raises(InvariantViolation):
        producer.prefill_chunk(0, prompt_of(400), 310, 330)
    with pytest.raises(InvariantViolation):
        producer.attach([memoryview(slots[0])[1:]])


def test_slot_of_a_prefill_profile_decodes_on_another():
    producer = load_prefill_engine(EngineSettings("rngd", "x", emulated_prefill_tokens_per_s=float("inf")))
    slot = bytearray(producer.capabilities.layout.slot_bytes)
    producer.attach([memoryview(slot)])
    prompt = prompt_of(300)
    logits = prefill(producer, 0, prompt, chunk_bounds(0, 300, 256))
    engine = load_decode_engine(EngineSettings("atom", "x", max_tokens=512, emulated_decode_ms=0.0))
    load_lane(engine, 0, slot_array(producer, slot), 300)
    assert generate(engine, 0, logits, 6) == expected_tokens(prompt.tolist(), 6, ignore_eos=True)


def test_oracle_stops_where_it_is_told():
    prompt = prompt_of(4).tolist()
    free_run = expected_tokens(prompt, 600, ignore_eos=True)
    assert len(free_run) == 600
    to_the_end = expected_tokens(prompt, 600)
    assert to_the_end == free_run[: free_run.index(EOS) + 1]
    assert (
        expected_tokens(prompt, 600, stop_token_ids=[free_run[5]])
        == (free_run[: free_run.index(free_run[5]) + 1])
    )
