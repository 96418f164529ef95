"""Emulated engines that write KV in other forms, or answer no logits.

Decides whether every way to convert wrongly shows in the tokens: the right conversion between two engines of
different forms must lead to the oracle's tokens, and any other must not.
"""

import dataclasses
import itertools

import numpy as np
import pytest

from common.decode_config import DecodeConfig
from common.engines.emulated import EmulatedDecodeEngine, EmulatedPrefillEngine
from common.engines.registry import EngineSettings
from common.errors import ConfigError, InvariantViolation
from common.kv_convert import KvConverter, KvForm
from common.kv_layout import chunk_bounds
from common.prefill_config import PrefillConfig
from tests.oracle import expected_tokens, oracle_kv, oracle_logits

CHUNK = 16
PROMPT = np.random.default_rng(5).integers(0, 256, 45)
ANSWER = expected_tokens(PROMPT.tolist(), 6, ignore_eos=True)
INSTANT = EngineSettings(
    "emulated",
    model="unused",
    max_tokens=96,
    chunk_tokens=CHUNK,
    emulated_prefill_tokens_per_s=float("inf"),
    emulated_decode_ms=0.0,
)
FORMS = [
    {"emulated_rope_form": rope_form, "emulated_heads_reversed": reverse}
    for rope_form, reverse in itertools.product(("half", "interleaved"), (False, True))
]
NAMES = ["natural", "reversed", "interleaved", "both"]


def prefill_engine(**changes) -> tuple[EmulatedPrefillEngine, np.ndarray]:
    """An engine with one slot, and the slot as an array."""
    engine = EmulatedPrefillEngine(dataclasses.replace(INSTANT, **changes))
    slot = bytearray(b"\xa5") * engine.capabilities.layout.slot_bytes
    engine.attach([memoryview(slot)])
    return engine, np.frombuffer(slot, dtype=np.uint8).reshape(engine.capabilities.layout.shape)


def decode_engine(**changes) -> EmulatedDecodeEngine:
    return EmulatedDecodeEngine(dataclasses.replace(INSTANT, **changes))


def prefill(engine, prompt: np.ndarray = PROMPT, start: int = 0) -> np.ndarray | None:
    """Logits of the last chunk of memory 0; no other chunk has any."""
    bounds = chunk_bounds(start, len(prompt), CHUNK)
    answers = [engine.prefill_chunk(0, prompt, begin, end) for begin, end in bounds]
    assert all(logits is None for logits in answers[:-1])
    return answers[-1]


def tokens_of(engine: EmulatedDecodeEngine, first: int = ANSWER[0]) -> list[int]:
    """Greedy tokens from lane 0, whose KV is that of the prompt; the first is known."""
    tokens = [first]
    while len(tokens) < len(ANSWER):
        tokens.append(int(engine.step([0], tokens[-1:])[0].argmax()))
    return tokens


def expected_slot(rope_form: str, heads_reversed: bool) -> np.ndarray:
    """The prompt's KV in that form, byte by byte from the oracle's."""
    natural = np.frombuffer(oracle_kv(PROMPT.tolist()), dtype=np.uint8).reshape(4, 2, 45, 2, 8)
    expected = np.empty_like(natural)
    for part, head, byte in itertools.product((0, 1), (0, 1), range(8)):
        pair, second = divmod(byte, 2)
        element = pair + 4 * second if rope_form == "interleaved" and part == 0 else byte
        expected[:, part, :, head, byte] = natural[:, part, :, 1 - head if heads_reversed else head, element]
    return expected


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_each_form_lies_in_the_slot_as_declared(form: dict) -> None:
    engine, slot = prefill_engine(**form)
    logits = prefill(engine)
    assert logits.tolist() == oracle_logits(PROMPT.tolist())
    assert np.array_equal(slot[:, :, :45], expected_slot(*form.values()))
    assert (slot[:, :, 45:] == 0xA5).all()
    assert engine.capabilities.rope_form == form["emulated_rope_form"]
    assert engine.capabilities.head_order == ((1, 0) if form["emulated_heads_reversed"] else ())


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_local_prefill_and_steps_do_not_depend_on_the_form(form: dict) -> None:
    engine = decode_engine(**form)
    assert prefill(engine).tolist() == oracle_logits(PROMPT.tolist())
    assert np.array_equal(engine.read_kv(0, 0, 4, 0, 45), expected_slot(*form.values()))
    assert tokens_of(engine) == ANSWER


@pytest.mark.parametrize("target", FORMS, ids=NAMES)
@pytest.mark.parametrize("source", FORMS, ids=NAMES)
def test_only_the_right_conversion_leads_to_the_tokens_of_the_oracle(source: dict, target: dict) -> None:
    producer, slot = prefill_engine(**source)
    prefill(producer)
    engine = decode_engine(**target)
    own, wanted = producer.capabilities.form, engine.capabilities.form
    others = [KvForm("uint8", form, order) for form in ("half", "interleaved") for order in ((), (1, 0))]
    assert wanted in others
    for form in others:
        engine.write_kv(0, 0, 0, KvConverter(own, form, 8).convert(slot[:, :, :45]))
        engine.set_length(0, 45)
        assert (tokens_of(engine) == ANSWER) == (form == wanted), form


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
@pytest.mark.parametrize("part", [0, 1])
def test_a_wrong_byte_in_any_form_spoils_what_is_computed_behind_it(form: dict, part: int) -> None:
    engine, slot = prefill_engine(**form)
    prefill(engine, PROMPT[:32])
    assert prefill(engine, PROMPT, 32).tolist() == oracle_logits(PROMPT.tolist())
    slot[2, part, 7, 1, 3] ^= 1
    assert prefill(engine, PROMPT, 32).tolist() != oracle_logits(PROMPT.tolist())


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_kv_read_from_one_lane_serves_another(form: dict) -> None:
    engine = decode_engine(lanes=2, **form)
    prefill(engine)
    engine.step([0], [ANSWER[0]])
    piece = engine.read_kv(0, 1, 3, 5, 46)
    assert piece.shape == (2, 2, 41, 2, 8)
    assert piece.flags.c_contiguous
    for first, last in ((0, 1), (1, 4)):
        for start, end in ((0, 20), (20, 46)):
            engine.write_kv(1, first, start, engine.read_kv(0, first, last, start, end))
    engine.set_length(1, 46)
    engine.set_length(0, 0)
    piece[...] = 0  # a copy: the lane does not notice
    assert engine.step([1], [ANSWER[1]])[0].tolist() == oracle_logits([*PROMPT.tolist(), *ANSWER[:2]])


def test_kv_behind_the_end_of_a_lane_cannot_be_read() -> None:
    engine = decode_engine()
    prefill(engine)
    assert engine.read_kv(0, 0, 4, 45, 45).shape == (4, 2, 0, 2, 8)
    with pytest.raises(InvariantViolation, match="shorter"):
        engine.read_kv(0, 0, 4, 44, 46)
    engine.set_length(0, 0)
    with pytest.raises(InvariantViolation, match="shorter"):
        engine.read_kv(0, 0, 4, 0, 1)


def test_without_logits_the_decode_engine_computes_the_last_prompt_token() -> None:
    producer, slot = prefill_engine(emulated_no_logits=True)
    assert not producer.capabilities.logits
    assert prefill(producer, PROMPT[:-1]) is None
    engine = decode_engine()
    assert engine.capabilities.logits
    engine.write_kv(0, 0, 0, slot[:, :, :44])
    engine.set_length(0, 44)
    logits = engine.step([0], [int(PROMPT[-1])])[0]
    assert logits.tolist() == oracle_logits(PROMPT.tolist())
    assert tokens_of(engine, int(logits.argmax())) == ANSWER


def test_the_configuration_reaches_the_engines() -> None:
    flags = {"backend": "emulated", "emulated_rope_form": "interleaved", "emulated_heads_reversed": True}
    prefill_settings = PrefillConfig(**flags, emulated_no_logits=True).engine_settings()
    capabilities = EmulatedPrefillEngine(prefill_settings).capabilities
    assert capabilities.form == KvForm("uint8", "interleaved", (1, 0))
    assert not capabilities.logits
    assert (
        EmulatedDecodeEngine(DecodeConfig(**flags).engine_settings()).capabilities.form == capabilities.form
    )


@pytest.mark.parametrize("backend", ["emulated", "rngd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_opaque_entries_are_not_sent_as_numbers(backend: str, dtype: str) -> None:
    with pytest.raises(ConfigError, match=rf"--kv-wire-dtype {dtype}: .*use auto$"):
        PrefillConfig(backend=backend, kv_wire_dtype=dtype)
    assert PrefillConfig(backend=backend, kv_wire_dtype="auto").kv_wire_dtype == "auto"
    assert PrefillConfig(backend="torch", dtype="float16", kv_wire_dtype=dtype).kv_wire_dtype == dtype
