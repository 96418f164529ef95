"""The torch engine against the model as transformers itself runs it.

Tokens must equal those of `generate()`; what passes from a slot into a lane must lead to the very bits that
local computation in the lane gives, for the same chunks.
"""

import json
import mmap
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from common.engines.hf_tokenizer import HuggingFaceTokenizer
from common.engines.model_fetch import fetch_named_model
from common.engines.model_files import NAMED_MODEL, ModelFiles
from common.engines.registry import EngineSettings
from common.engines.torch_engine import TorchDecodeEngine, TorchPrefillEngine
from common.errors import ConfigError, InvariantViolation
from common.kv_convert import KvConverter, KvForm
from common.kv_layout import chunk_bounds

pytestmark = pytest.mark.real_model

CHUNK = 64
MAX_TOKENS = 384
NEW_TOKENS = 10
TEXT = (
    "In 1876 a clockmaker left the valley with two mules, 340 pocket watches and a letter that he had "
    "promised not to open.\n\n1. He sold the first watch to a ferryman, who paid in salt.\n\n2. The second "
    "he gave away, because the child who asked for it wanted to know why time needs hands. "
)


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return fetch_named_model(lambda stage, done, total: None)


def settings_of(directory: Path, **others) -> EngineSettings:
    defaults = {"max_tokens": MAX_TOKENS, "chunk_tokens": CHUNK, "lanes": 2}
    return EngineSettings(backend="torch", model=str(directory), **(defaults | others))


@pytest.fixture(scope="module")
def tokenizer(files: ModelFiles) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(files.directory)


@pytest.fixture(scope="module")
def token_ids(tokenizer: HuggingFaceTokenizer) -> np.ndarray:
    return np.array(tokenizer.encode(TEXT * 5), dtype=np.int64)


@pytest.fixture(scope="module")
def reference(files: ModelFiles):
    return AutoModelForCausalLM.from_pretrained(files.directory, dtype=torch.float32, local_files_only=True)


def make_pair(settings: EngineSettings) -> SimpleNamespace:
    """Both engines, over slots and lanes that hold NaN, which any stray read would spread."""
    prefill, decode = TorchPrefillEngine(settings), TorchDecodeEngine(settings)
    layout = prefill.capabilities.layout
    dtype = {"float32": np.float32, "bfloat16": np.uint16}[settings.dtype]
    slots = [np.frombuffer(bytearray(b"\xff") * layout.slot_bytes, dtype).reshape(layout.shape)] * 2
    slots = [slot.copy() for slot in slots]
    prefill.attach([memoryview(slot).cast("B") for slot in slots])
    for lane in range(settings.lanes):
        decode.write_kv(lane, 0, 0, slots[0])
    return SimpleNamespace(prefill=prefill, decode=decode, slots=slots, layout=layout)


@pytest.fixture(scope="module")
def pair(files: ModelFiles) -> SimpleNamespace:
    return make_pair(settings_of(files.directory))


def prefill_in(engine, memory: int, prompt: np.ndarray, start: int = 0) -> np.ndarray:
    """Logits of the prompt's last token; checks that no other chunk answers any."""
    logits = None
    for begin, end in chunk_bounds(start, len(prompt), engine.capabilities.chunk_tokens):
        assert logits is None
        logits = engine.prefill_chunk(memory, prompt, begin, end)
    assert logits is not None
    assert logits.dtype == np.float32
    return logits


def hand_over(pair: SimpleNamespace, slot: int, lane: int, token_count: int) -> None:
    """Copy a slot into a lane as the decode node does: piece by piece, from memory it may only read."""
    view = pair.slots[slot].view()
    view.flags.writeable = False
    for layer in range(0, pair.layout.layers, 7):
        for begin, end in chunk_bounds(0, token_count, 100):
            pair.decode.write_kv(lane, layer, begin, view[layer : layer + 7, :, begin:end])
    pair.decode.set_length(lane, token_count)


def greedy(decode: TorchDecodeEngine, lane: int, logits: np.ndarray, count: int) -> list[int]:
    tokens = [int(logits.argmax())]
    while len(tokens) < count:
        tokens.append(int(decode.step([lane], [tokens[-1]])[0].argmax()))
    return tokens


def assert_same_tokens(reference, prompt: np.ndarray, tokens: list[int]) -> None:
    """Equal to `generate()`, up to a place where its two best logits are too close to tell apart."""
    ids = torch.from_numpy(prompt)[None]
    outcome = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=len(tokens),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    expected = outcome.sequences[0, len(prompt) :].tolist()
    for position, (token, right) in enumerate(zip(tokens, expected, strict=True)):
        if token != right:
            best, second = outcome.logits[position][0].topk(2).values.tolist()
            assert best - second < 1e-3, f"token {position} of {tokens} is not {right}"
            return


@pytest.mark.parametrize("prompt_tokens", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 300])
def test_tokens_equal_those_of_generate(pair, reference, token_ids, prompt_tokens: int) -> None:
    prompt = token_ids[:prompt_tokens]
    logits = prefill_in(pair.prefill, 0, prompt)
    hand_over(pair, 0, 1, prompt_tokens)
    assert_same_tokens(reference, prompt, greedy(pair.decode, 1, logits, NEW_TOKENS))


@pytest.mark.parametrize("prompt_tokens", [1, CHUNK + 1, 200])
def test_a_slot_leads_to_the_bits_of_local_prefill(pair, token_ids, prompt_tokens: int) -> None:
    prompt = token_ids[:prompt_tokens]
    remote = prefill_in(pair.prefill, 1, prompt)
    local = prefill_in(pair.decode, 0, prompt)
    assert np.array_equal(remote, local)

    hand_over(pair, 1, 1, prompt_tokens)
    for token in token_ids[200:204].tolist():
        of_local, of_remote = pair.decode.step([0, 1], [token, token])
        assert np.array_equal(of_local, of_remote)
        assert not np.isnan(of_local).any()


@pytest.mark.parametrize("prompt_tokens", [1, 2, CHUNK + 1])
def test_a_prompt_handed_over_one_token_short_gives_the_tokens_of_generate(
    pair, reference, token_ids, prompt_tokens: int
) -> None:
    prompt = token_ids[:prompt_tokens]
    if prompt_tokens > 1:
        prefill_in(pair.prefill, 0, prompt[:-1])
    hand_over(pair, 0, 1, prompt_tokens - 1)
    logits = pair.decode.step([1], [int(prompt[-1])])[0]
    assert_same_tokens(reference, prompt, greedy(pair.decode, 1, logits, NEW_TOKENS))


def test_lanes_do_not_disturb_each_other(pair, token_ids) -> None:
    alone = greedy(pair.decode, 0, prefill_in(pair.decode, 0, token_ids[:40]), 6)
    first, second = prefill_in(pair.decode, 0, token_ids[:40]), prefill_in(pair.decode, 1, token_ids[40:150])
    tokens = [[int(first.argmax())], [int(second.argmax())]]
    while len(tokens[0]) < 6:
        both = pair.decode.step([1, 0], [tokens[1][-1], tokens[0][-1]])
        tokens[1].append(int(both[0].argmax()))
        tokens[0].append(int(both[1].argmax()))
    assert tokens[0] == alone


def test_a_prefill_continues_behind_a_prefix(pair, token_ids) -> None:
    prompt = token_ids[: 2 * CHUNK + 20]
    whole = prefill_in(pair.decode, 0, prompt)
    hand_over(pair, 0, 1, 0)
    prefill_in(pair.prefill, 0, prompt)
    pair.decode.write_kv(1, 0, 0, pair.slots[0][:, :, :CHUNK])
    pair.decode.set_length(1, CHUNK)
    assert np.array_equal(prefill_in(pair.decode, 1, prompt, start=CHUNK), whole)


def test_kv_read_from_a_lane_is_what_lies_in_the_slot_and_serves_another_lane(pair, token_ids) -> None:
    prompt = token_ids[: CHUNK + 20]
    prefill_in(pair.prefill, 0, prompt)
    prefill_in(pair.decode, 0, prompt)
    piece = pair.decode.read_kv(0, 3, 10, 30, len(prompt))
    assert piece.flags.c_contiguous
    assert np.array_equal(piece, pair.slots[0][3:10, :, 30 : len(prompt)])

    for token in token_ids[:3].tolist():
        pair.decode.step([0], [token])
    end = len(prompt) + 3
    pair.decode.write_kv(1, 0, 0, pair.decode.read_kv(0, 0, pair.layout.layers, 0, end))
    pair.decode.set_length(1, end)
    of_first, of_second = pair.decode.step([0, 1], [5, 5])
    assert np.array_equal(of_first, of_second)
    with pytest.raises(InvariantViolation, match="shorter"):
        pair.decode.read_kv(0, 0, 1, 0, end + 2)


def test_memory_holds_no_position_beyond_its_end(pair, token_ids) -> None:
    full = np.resize(token_ids, MAX_TOKENS)
    prefill_in(pair.decode, 0, full)
    with pytest.raises(InvariantViolation, match="positions"):
        pair.decode.step([0], [5])
    with pytest.raises(InvariantViolation, match="positions"):
        pair.decode.set_length(0, MAX_TOKENS + 1)


def test_the_slab_cannot_close_under_the_engine_but_after_it_let_go(pair, token_ids) -> None:
    slab = mmap.mmap(-1, pair.layout.slot_bytes)
    try:
        pair.prefill.attach([memoryview(slab)])
        prefill_in(pair.prefill, 0, token_ids[:5])
        with pytest.raises(BufferError):
            slab.close()
        pair.prefill.attach([])
        slab.close()
    finally:
        pair.prefill.attach([memoryview(slot).cast("B") for slot in pair.slots])


def test_the_identity_is_that_of_the_source(pair, files: ModelFiles) -> None:
    identity = pair.prefill.capabilities.identity
    assert identity == pair.decode.capabilities.identity
    assert identity.model_id == NAMED_MODEL
    assert identity.weights_digest == files.weights_digest
    assert files.weights_digest.startswith("sha256:b179c9523d0e6a0f")
    assert (identity.layers, identity.kv_heads, identity.head_dim, identity.vocab_size) == (30, 3, 64, 49152)
    assert (pair.prefill.capabilities.lanes, pair.decode.capabilities.lanes) == (0, 2)
    assert pair.decode.capabilities.local_prefill


def test_the_tokenizer_needs_no_torch(files: ModelFiles) -> None:
    program = (
        "import sys; from common.engines.model_files import load_hugging_face_tokenizer as load; "
        f"ids = load({str(files.directory)!r}).encode('to be'); assert ids and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_text_is_cut_as_the_model_learned_it(tokenizer: HuggingFaceTokenizer) -> None:
    """Runs of spaces stay together before a digit, and every digit is a token."""
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("a\n\n12  3")]
    assert pieces == ["a", "\n\n", "1", "2", "  ", "3"]


def test_text_survives_the_round_trip(tokenizer: HuggingFaceTokenizer) -> None:
    text = " Hello , world !  don 't \n\t 你好 🙂 2024"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("") == []
    assert tokenizer.decode(tokenizer.encode("🙂")[:-1]).endswith("\ufffd")


def test_a_chat_is_what_transformers_makes_of_it(files: ModelFiles, tokenizer: HuggingFaceTokenizer) -> None:
    messages = [{"role": "user", "content": "Count to 3."}]
    theirs = AutoTokenizer.from_pretrained(files.directory, local_files_only=True)
    ids = tokenizer.encode_chat(messages)
    assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert theirs.decode(ids).endswith("<|im_start|>user\nCount to 3.<|im_end|>\n<|im_start|>assistant\n")
    assert "<|im_start|>" not in tokenizer.decode(ids)
    ends = [theirs.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert tokenizer.eos_token_ids == set(ends)


@pytest.mark.parametrize("messages", [[], [{}], [{"role": "user"}], [{"role": "user", "content": 5}], ["hi"]])
def test_messages_that_do_not_fit_are_a_value_error(tokenizer: HuggingFaceTokenizer, messages) -> None:
    with pytest.raises(ValueError, match="message"):
        tokenizer.encode_chat(messages)


def write_model(directory: Path, model_type: str, **fields) -> Path:
    """A model of random weights, small enough to load at once."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 96,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(model_type, **(sizes | fields))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def test_bfloat16_passes_as_bits(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", "llama")
    pair = make_pair(settings_of(directory, max_tokens=64, chunk_tokens=8, dtype="bfloat16"))
    prompt = np.arange(1, 22)
    remote = prefill_in(pair.prefill, 0, prompt)
    assert np.array_equal(prefill_in(pair.decode, 0, prompt), remote)
    hand_over(pair, 0, 1, len(prompt))
    assert np.array_equal(pair.decode.read_kv(0, 0, 2, 0, 21), pair.slots[0][:, :, :21])
    of_local, of_remote = pair.decode.step([0, 1], [30, 30])
    assert np.array_equal(of_local, of_remote)

    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        expected = plain(torch.tensor([[*prompt.tolist(), 30]])).logits[0, -1].numpy()
    assert np.corrcoef(expected, of_remote)[0, 1] > 0.99


@pytest.mark.parametrize(
    ("dtype", "error_max"), [("float32", 0), ("bfloat16", 2e-2), ("float16", 2e-3), ("int8", 5e-2)]
)
def test_each_wire_dtype_keeps_the_logits_within_its_error(
    tmp_path: Path, dtype: str, error_max: float
) -> None:
    settings = settings_of(write_model(tmp_path / "model", "llama"), max_tokens=64, chunk_tokens=8)
    pair = make_pair(settings)
    prompt = np.arange(1, 22)
    prefill_in(pair.prefill, 0, prompt)
    prefill_in(pair.decode, 0, prompt)
    own, sent = pair.prefill.capabilities.form, KvForm(dtype)
    head_dim = pair.layout.head_dim
    wire = KvConverter(own, sent, head_dim).convert(pair.slots[0][:, :, :21])
    pair.decode.write_kv(1, 0, 0, KvConverter(sent, own, head_dim).convert(wire))
    pair.decode.set_length(1, 21)
    exact, converted = pair.decode.step([0, 1], [30, 30])
    error = np.abs(exact - converted).max() / exact.std()
    assert error == 0 if error_max == 0 else 0 < error < error_max


@pytest.mark.parametrize("model_type", ["qwen3", "phi3", "gptj"])
def test_other_families_give_the_tokens_of_generate(tmp_path: Path, model_type: str) -> None:
    others = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 96}
    if model_type == "gptj":
        others["num_key_value_heads"] = 4
    directory = write_model(tmp_path / "model", model_type, **(others if model_type == "gptj" else {}))
    pair = make_pair(settings_of(directory, max_tokens=64, chunk_tokens=8))
    form = KvForm("float32", "interleaved", (), 4) if model_type == "gptj" else KvForm("float32", "half")
    assert pair.prefill.capabilities.form == form
    prompt = np.arange(1, 22)
    logits = prefill_in(pair.prefill, 0, prompt)
    hand_over(pair, 0, 0, len(prompt))
    plain = AutoModelForCausalLM.from_pretrained(directory)
    assert_same_tokens(plain, prompt, greedy(pair.decode, 0, logits, 12))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, "layers of type sliding_attention"),
        ({"model_type": "deepseek_v3"}, "multi-head latent attention"),
        ({"model_type": "mamba"}, "layers of type linear_attention"),
        ({"model_type": "t5"}, "encoder"),
        ({"model_type": "nonesuch"}, "cannot read the configuration"),
    ],
)
def test_models_without_an_ordinary_cache_are_refused(tmp_path: Path, fields: dict, reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "model.safetensors").write_bytes(b"not looked at")
    with pytest.raises(ConfigError, match=reason):
        TorchPrefillEngine(settings_of(tmp_path))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"max_tokens": 97}, "97 are more than the 96"), ({"dtype": "float8"}, "dtype float8 is unknown")],
)
def test_flags_that_the_model_forbids_are_refused(tmp_path: Path, settings: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        TorchDecodeEngine(settings_of(write_model(tmp_path / "model", "llama"), **settings))


@pytest.mark.parametrize("damage", ["truncated", "incomplete"])
def test_weights_that_are_not_whole_are_refused(tmp_path: Path, damage: str) -> None:
    weights = write_model(tmp_path / "model", "llama") / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        tensors = load_file(weights)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"cannot load|lack model\.layers\.1\.mlp\.up_proj\.weight"):
        TorchPrefillEngine(settings_of(weights.parent, max_tokens=64))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
