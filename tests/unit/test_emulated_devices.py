"""The emulated devices: declared times, roles, identity, and the byte tokenizer.

Decides whether a device costs what it declares, whatever the machine does, and refuses what it cannot do.
What the devices compute is the business of `test_emulated.py`.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common import clock
from common.engines.byte_tokenizer import BOS, END_OF_TURN, EOS, ByteTokenizer
from common.engines.emulated import EmulatedDecodeEngine, EmulatedPrefillEngine
from common.engines.registry import EngineSettings, load_decode_engine, load_prefill_engine
from common.errors import ConfigError, InvariantViolation

REPOSITORY = Path(__file__).parents[2]
PROMPT = np.arange(65, 85)


def decode_engine(**fields):
    return EmulatedDecodeEngine(EngineSettings("emulated", "unused", **fields))


@pytest.fixture
def fake_clock(monkeypatch):
    """A clock that only sleeping moves; the list collects the sleeps in ms."""
    pauses = []
    monkeypatch.setattr(clock, "now_us", lambda: round(1_000 * sum(pauses)))
    monkeypatch.setattr(clock, "pause_ms", pauses.append)
    return pauses


@pytest.mark.parametrize(
    ("backend", "start", "end", "declared_ms"),
    [
        ("emulated", 0, 128, 6.4),
        ("emulated", 0, 10, 0.5),
        ("rngd", 0, 256, 64.0),
        ("rngd", 0, 1, 64.0),
        ("rngd", 100, 256, 64.0),
    ],
)
def test_chunk_costs_its_tokens_and_a_bucketed_one_the_whole_bucket(
    fake_clock, backend, start, end, declared_ms
):
    engine = load_prefill_engine(EngineSettings(backend, "unused"))
    engine.attach([memoryview(bytearray(engine.capabilities.layout.slot_bytes))])
    engine.prefill_chunk(0, np.arange(end), start, end)
    assert fake_clock == [pytest.approx(declared_ms)]


@pytest.mark.parametrize(
    ("backend", "override_ms", "declared"),
    [("emulated", None, [1.0]), ("atom", None, [10.0]), ("atom", 0, [])],
)
def test_step_costs_the_declared_time_however_many_lanes(fake_clock, backend, override_ms, declared):
    engine = EmulatedDecodeEngine(EngineSettings(backend, "unused", lanes=2, emulated_decode_ms=override_ms))
    engine.step([0, 1], [65, 66])
    assert fake_clock == declared


def test_speed_overrides_the_profile(fake_clock):
    engine = decode_engine(emulated_prefill_tokens_per_s=500.0)
    engine.prefill_chunk(0, PROMPT, 0, 16)
    engine.prefill_chunk(0, PROMPT, 16, 20)
    assert fake_clock == [32.0, 8.0]


def test_late_wake_up_is_made_up_for_but_a_stall_is_not(monkeypatch):
    time_ms = [0.0]
    overruns = iter([0.25, 0.0, 50.0, 0.0, 0.0])
    pauses = []

    def sleep(duration_ms):
        pauses.append(duration_ms)
        time_ms[0] += duration_ms + next(overruns)

    monkeypatch.setattr(clock, "now_us", lambda: round(1_000 * time_ms[0]))
    monkeypatch.setattr(clock, "pause_ms", sleep)
    engine = decode_engine(emulated_decode_ms=4.0)
    for _ in range(5):
        engine.step([0], [65])
    assert pauses == [4.0, 3.75, 4.0, 3.0, 4.0]


def test_work_counts_towards_the_declared_time(monkeypatch):
    pauses = []
    readings = iter([0, 1_500, 4_000])
    monkeypatch.setattr(clock, "now_us", lambda: next(readings))
    monkeypatch.setattr(clock, "pause_ms", pauses.append)
    decode_engine(emulated_decode_ms=4.0).step([0], [65])
    assert pauses == [2.5]


@pytest.mark.parametrize("backend", ["emulated", "rngd"])
def test_longest_chunk_bounds_the_declared_time(backend):
    slow = EngineSettings(backend, "unused", chunk_tokens=64, emulated_prefill_tokens_per_s=10.0)
    assert load_prefill_engine(slow).capabilities.longest_chunk_ms > 6_400
    assert load_prefill_engine(EngineSettings(backend, "unused")).capabilities.longest_chunk_ms >= 1_000


def test_longest_step_bounds_the_declared_time():
    slow = EngineSettings("atom", "unused", emulated_decode_ms=3_000.0)
    assert load_decode_engine(slow).capabilities.longest_chunk_ms > 3_000


def test_profiles_refuse_the_role_they_lack():
    with pytest.raises(ConfigError):
        EmulatedPrefillEngine(EngineSettings("atom", "unused"))
    with pytest.raises(ConfigError):
        EmulatedDecodeEngine(EngineSettings("rngd", "unused"))
    atom = EmulatedDecodeEngine(EngineSettings("atom", "unused"))
    assert not atom.capabilities.local_prefill
    with pytest.raises(InvariantViolation):
        atom.prefill_chunk(0, PROMPT, 0, 20)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
def test_impossible_speeds_are_refused(speed):
    with pytest.raises(ConfigError):
        decode_engine(emulated_prefill_tokens_per_s=speed)


@pytest.mark.parametrize("step_ms", [-1.0, float("nan")])
def test_impossible_step_times_are_refused(step_ms):
    with pytest.raises(ConfigError):
        decode_engine(emulated_decode_ms=step_ms)


def test_every_profile_of_one_seed_is_the_same_model_whatever_model_names():
    engines = [
        load_prefill_engine(EngineSettings("rngd", "some/model", dtype="bfloat16")),
        load_prefill_engine(EngineSettings("emulated", "other")),
        load_decode_engine(EngineSettings("emulated", "")),
        load_decode_engine(EngineSettings("atom", "third.gguf", max_tokens=64)),
    ]
    assert len({engine.capabilities.identity for engine in engines}) == 1
    assert {engine.capabilities.dtype for engine in engines} == {"uint8"}
    assert {engine.capabilities.rope_form for engine in engines} == {"half"}


def test_another_seed_is_another_model():
    identities = [decode_engine(emulated_seed=seed).capabilities.identity for seed in (0, 1)]
    assert identities[0].model_id != identities[1].model_id
    assert identities[0].weights_digest != identities[1].weights_digest
    assert identities[0].tokenizer_digest == identities[1].tokenizer_digest


def test_import_is_light():
    script = (
        "import sys, common.engines.emulated;"
        "heavy = {'torch', 'transformers', 'zmq', 'msgpack'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", ["", "hello", "naïve ✓ 🚲", "\x00\x7f"])
def test_text_survives_the_tokenizer(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_decode_drops_specials_and_replaces_incomplete_text():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([BOS, *b"ok", EOS, END_OF_TURN]) == "ok"
    assert tokenizer.decode(list("é".encode())[:1]) == "\ufffd"


def test_text_without_utf8_form_is_a_value_error():
    with pytest.raises(ValueError):
        ByteTokenizer().encode("\ud800")


def test_chat_template_names_roles_and_asks_for_the_assistant():
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    token_ids = ByteTokenizer().encode_chat(messages)
    turns = [b"system: be brief", b"user: hi"]
    assert token_ids == [BOS, *turns[0], END_OF_TURN, *turns[1], END_OF_TURN, *b"assistant: "]


@pytest.mark.parametrize(
    "messages",
    [[], [{"role": "robot", "content": "x"}], [{"role": "user"}], [{"role": "user", "content": None}]],
)
def test_conversation_that_does_not_fit_the_template_is_refused(messages):
    with pytest.raises(ValueError):
        ByteTokenizer().encode_chat(messages)
