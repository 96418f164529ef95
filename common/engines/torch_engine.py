"""A decoder-only Hugging Face model whose KV cache is the slab itself.

Decides what a real model computes on either side; loaded through `common/engines/registry.py`, driven by one
compute thread. A prefill engine writes into slots (wire layout), a decode engine into lanes (head-major,
which reads faster one token at a time). It must never read KV beyond what was declared, and never serve a
model that keeps anything but an ordinary KV cache: such a model is refused at load, by its configuration and
by a check that chunked computation through the slab gives the logits of plain computation.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AttentionInterface, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from common import clock
from common.engines.interface import Capabilities, ModelIdentity
from common.engines.lane_batch import LanesCache, batch_rows, lanes_attention, speed_up_rows
from common.engines.model_files import ModelFiles, resolve_model
from common.engines.registry import EngineSettings
from common.engines.slab_cache import (
    TORCH_DTYPES,
    CausalBand,
    SlabCache,
    as_wire,
    slot_memory,
    wire_piece,
)
from common.errors import ConfigError, check

DEFAULT_CHUNK_TOKENS = 256
DEFAULT_MAX_TOKENS = 2048

# The bound of a chunk, as a multiple of what was measured at load: other work may share the cores.
STALL_FACTOR = 10
LONGEST_CHUNK_MS_MIN = 10_000

# Root mean square of what the logits of the check at load may differ by, as a share of their spread.
_TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}

# What a model raises that does something else with its KV than an ordinary one.
_MODEL_ERRORS = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)

_INTERLEAVED_ROPE = {"codegen", "cohere", "cohere2", "ernie4_5", "glm", "glm4", "gptj"}

AttentionInterface.register("slab", lanes_attention)


class _Model:
    """The loaded model, and one forward pass over a cache. Raises ConfigError for a model it cannot serve."""

    def __init__(self, settings: EngineSettings, lanes: int) -> None:
        torch.set_num_threads(settings.threads)
        files = resolve_model(settings.model)
        self._config = _ordinary_config(files)
        self.capabilities = _capabilities(settings, files, self._config, lanes)
        dtype = TORCH_DTYPES[settings.dtype]
        self._model = _load(files, self._config, dtype)
        speed_up_rows(self._model)
        self._band = CausalBand(self.capabilities.chunk_tokens, self.capabilities.max_tokens, dtype)
        self._positions = torch.arange(self.capabilities.max_tokens)[None]

    @torch.inference_mode()
    def forward(self, cache: SlabCache, token_ids: torch.Tensor, start: int, with_logits: bool) -> Any:
        """KV of `token_ids` (`[count]`) from position `start` on; logits of the last if asked for.

        Logits are float32 `[vocab_size]` in memory of their own.
        """
        end = start + len(token_ids)
        check(end <= self.capabilities.max_tokens, f"{end} positions in KV memory for fewer")
        cache.begin(start)
        arguments = {
            "input_ids": token_ids[None],
            "position_ids": self._positions[:, start:end],
            "attention_mask": self._band.mask(start, end),
            "cache": cache,
            "use_cache": True,
        }
        if not with_logits:
            self._model.base_model(**arguments)
            return None
        return self._model(**arguments, logits_to_keep=1).logits[0, -1].float().numpy()

    @torch.inference_mode()
    def step(
        self, cache: LanesCache, lanes: list[int], positions: list[int], token_ids: list[int]
    ) -> np.ndarray:
        """One token behind each of several lanes, at that lane's position.

        Logits are float32 `[lane, vocab_size]`. The pass gets rows of no lane, whose token is the first
        lane's: they are neither kept nor read.
        """
        check(max(positions) < self.capabilities.max_tokens, "a lane has no room for another position")
        cache.begin(list(zip(lanes, positions, strict=True)))
        spare = batch_rows(len(lanes)) - len(lanes)
        logits = self._model(
            input_ids=torch.tensor(token_ids + token_ids[:1] * spare)[:, None],
            position_ids=torch.tensor(positions + positions[:1] * spare)[:, None],
            attention_mask=None,
            cache=cache,
            use_cache=True,
        ).logits
        return logits[: len(lanes), -1].float().numpy()

    def prefill_chunk(
        self, cache: SlabCache, token_ids: np.ndarray, start: int, end: int
    ) -> np.ndarray | None:
        """As `PrefillEngine.prefill_chunk`, into `cache`."""
        check(0 <= start < end <= len(token_ids), f"chunk [{start}, {end}) of {len(token_ids)} tokens")
        check(end - start <= self.capabilities.chunk_tokens, f"a chunk of {end - start} tokens")
        chunk = torch.tensor(token_ids[start:end], dtype=torch.int64)
        return self.forward(cache, chunk, start, with_logits=end == len(token_ids))

    def sample_ids(self, count: int) -> np.ndarray:
        """Ids from all over the vocabulary: the first few are special, and odd in bfloat16."""
        count = min(count, self.capabilities.max_tokens)
        return np.linspace(0, self.capabilities.identity.vocab_size, count + 2, dtype=np.int64)[1:-1]

    def check_equal(self, expected: np.ndarray, found: np.ndarray, cause: str) -> None:
        """Raise ConfigError, with what made the difference, for logits that differ more than dtypes do."""
        difference = float(np.sqrt(np.square(expected - found).mean()) / expected.std())
        if not difference < _TOLERANCE[self.capabilities.dtype]:
            raise ConfigError(
                f"this model does not keep an ordinary KV cache: {cause} changes its logits by "
                f"{difference:.2g} of their spread"
            )

    def warm_up(self, cache: SlabCache) -> Capabilities:
        """Check the model through `cache` and time a chunk; what the engine declares, its speed included.

        Raises ConfigError when the model cannot run this way or gives other logits than without a cache.
        """
        ids = self.sample_ids(8)
        bounds = [(0, 1), (1, len(ids) - 1), (len(ids) - 1, len(ids))]
        try:
            with torch.inference_mode():
                plain = self._model(torch.from_numpy(ids)[None], use_cache=False).logits[0, -1].float()
            for start, end in (pair for pair in bounds if pair[0] < pair[1]):
                chunked = self.prefill_chunk(cache, ids, start, end)
        except _MODEL_ERRORS as error:
            raise ConfigError(f"the torch engine cannot run this model: {error}") from error
        self.check_equal(plain.numpy(), chunked, "computing in chunks")
        chunk_us = self._chunk_us(cache)
        bound_ms = self._chunk_bound_ms(chunk_us)
        return replace(self.capabilities, longest_chunk_ms=bound_ms, chunk_us=chunk_us)

    def _chunk_us(self, cache: SlabCache) -> int:
        """What a full chunk takes."""
        ids = np.zeros(self.capabilities.chunk_tokens + 1, dtype=np.int64)
        began_us = clock.now_us()
        self.prefill_chunk(cache, ids, 0, self.capabilities.chunk_tokens)
        return clock.now_us() - began_us

    def _chunk_bound_ms(self, chunk_us: int) -> int:
        """An upper bound of a chunk's time: that of a full one, made longer by attention at full length."""
        declared = self.capabilities
        # Per token: 4 operations per layer, position and query element, against 2 per weight.
        query_elements = self._config.num_attention_heads * declared.identity.head_dim
        attention = 2 * declared.max_tokens * query_elements * declared.identity.layers
        longest_ms = chunk_us / 1000 * (1 + attention / self._model.num_parameters())
        return max(LONGEST_CHUNK_MS_MIN, round(STALL_FACTOR * longest_ms))


class TorchPrefillEngine:
    """`PrefillEngine` of a Hugging Face model: the slab's slots are its KV cache."""

    def __init__(self, settings: EngineSettings) -> None:
        self._model = _Model(settings, lanes=0)
        layout = self._model.capabilities.layout
        scratch = slot_memory(memoryview(bytearray(layout.slot_bytes)), layout)
        self.capabilities = self._model.warm_up(SlabCache(scratch))
        self._slots: list[SlabCache] = []

    def attach(self, slots: list[memoryview]) -> None:
        """Compute into these slots from now on; an empty list lets go of all memory, so that it can close."""
        layout = self.capabilities.layout
        self._slots = [SlabCache(slot_memory(slot, layout)) for slot in slots]

    def prefill_chunk(
        self, slot_index: int, token_ids: np.ndarray, start: int, end: int
    ) -> np.ndarray | None:
        return self._model.prefill_chunk(self._slots[slot_index], token_ids, start, end)


class TorchDecodeEngine:
    """`DecodeEngine` of a Hugging Face model. Several lanes are computed in one batch, one as it is alone."""

    def __init__(self, settings: EngineSettings) -> None:
        self._model = _Model(settings, settings.lanes)
        layout = self._model.capabilities.layout
        layers, _, max_tokens, kv_heads, head_dim = layout.shape
        self._memory = torch.zeros(
            (layers, 2, settings.lanes, kv_heads, max_tokens, head_dim), dtype=TORCH_DTYPES[layout.dtype]
        )
        self._lanes = [SlabCache(self._memory[:, :, lane]) for lane in range(settings.lanes)]
        self._batch = LanesCache(self._memory)
        self._lengths = [0] * settings.lanes
        self.capabilities = self._model.warm_up(self._lanes[0])
        if settings.lanes > 1:
            self._check_batch()

    def _check_batch(self) -> None:
        """Raises ConfigError when a step of two lanes does not give what each of them gives alone."""
        ids = self._model.sample_ids(3).tolist()
        alone = [self.step([0], [token_id])[0] for token_id in ids][-1]
        self.set_length(0, 0)
        both = self.step([0], ids[:1])
        try:
            for behind, token_id in pairwise(ids):
                both = self.step([0, 1], [token_id, behind])
        except _MODEL_ERRORS as error:
            raise ConfigError(
                f"the torch engine cannot decode this model in several lanes: {error}"
            ) from error
        self._model.check_equal(alone, both[0], "decoding several lanes")
        self.set_length(0, 0)
        self.set_length(1, 0)

    def write_kv(self, lane: int, layer: int, start: int, piece: np.ndarray) -> None:
        source = wire_piece(piece, self.capabilities.dtype)
        layers, _, _, count, _ = source.shape
        self._memory[layer : layer + layers, :, lane, :, start : start + count].copy_(source)

    def read_kv(self, lane: int, first_layer: int, last_layer: int, start: int, end: int) -> np.ndarray:
        check(0 <= start <= end <= self._lengths[lane], f"KV of [{start}, {end}) in a lane that is shorter")
        return as_wire(self._memory[first_layer:last_layer, :, lane, :, start:end])

    def set_length(self, lane: int, token_count: int) -> None:
        check(0 <= token_count <= self.capabilities.max_tokens, f"a lane of {token_count} positions")
        self._lengths[lane] = token_count

    def step(self, lanes: list[int], token_ids: list[int]) -> np.ndarray:
        positions = [self._lengths[lane] for lane in lanes]
        if len(lanes) == 1:
            token = torch.tensor(token_ids)
            cache = self._lanes[lanes[0]]
            logits = self._model.forward(cache, token, positions[0], with_logits=True)[None]
        else:
            logits = self._model.step(self._batch, lanes, positions, token_ids)
        for lane in lanes:
            self._lengths[lane] += 1
        return logits

    def prefill_chunk(self, lane: int, token_ids: np.ndarray, start: int, end: int) -> np.ndarray | None:
        logits = self._model.prefill_chunk(self._lanes[lane], token_ids, start, end)
        self._lengths[lane] = end
        return logits


def _ordinary_config(files: ModelFiles) -> PreTrainedConfig:
    """The text model's configuration. Raises ConfigError unless every layer keeps an ordinary KV cache."""
    try:
        whole = AutoConfig.from_pretrained(files.directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read the configuration in {files.directory}: {error}") from error
    config = whole.get_text_config(decoder=True)
    reason = ""
    if whole.is_encoder_decoder:
        reason = "it has an encoder"
    elif getattr(config, "kv_lora_rank", None) is not None:
        reason = "it keeps compressed KV (multi-head latent attention)"
    elif others := sorted(set(get_layer_types_and_kwargs(config)[0]) - {"full_attention"}):
        reason = f"it has layers of type {', '.join(others)}"
    if reason:
        raise ConfigError(
            f"the torch engine cannot serve {files.model_id}: {reason}; it needs a decoder-only model whose "
            f"layers all keep an ordinary KV cache"
        )
    return config


def _capabilities(
    settings: EngineSettings, files: ModelFiles, config: PreTrainedConfig, lanes: int
) -> Capabilities:
    """What the engine declares, before its speed is known. Raises ConfigError for flags the model forbids."""
    if settings.dtype not in TORCH_DTYPES:
        raise ConfigError(f"dtype {settings.dtype} is unknown; choose one of {', '.join(TORCH_DTYPES)}")
    limit = getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_TOKENS
    max_tokens = settings.max_tokens or min(DEFAULT_MAX_TOKENS, limit)
    if max_tokens > limit:
        raise ConfigError(f"max tokens {max_tokens} are more than the {limit} that {files.model_id} can hold")
    heads = config.num_attention_heads
    identity = ModelIdentity(
        model_id=files.model_id,
        weights_digest=files.weights_digest,
        tokenizer_digest=files.tokenizer_digest,
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
    )
    return Capabilities(
        identity=identity,
        dtype=settings.dtype,
        rope_form="interleaved" if config.model_type in _INTERLEAVED_ROPE else "half",
        rotary_dim=_rotary_dim(config, identity.head_dim),
        max_tokens=max_tokens,
        chunk_tokens=min(settings.chunk_tokens or DEFAULT_CHUNK_TOKENS, max_tokens),
        lanes=lanes,
        local_prefill=lanes > 0,
    )


def _rotary_dim(config: PreTrainedConfig, head_dim: int) -> int:
    """How many of a head's first elements are rotated; 0 for all."""
    rope = getattr(config, "rope_parameters", None) or {}
    share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1
    rotated = getattr(config, "rotary_dim", None) or int(head_dim * share)
    return 0 if rotated == head_dim else rotated


def _load(files: ModelFiles, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model in evaluation mode; float32 weights stay mapped, and so are shared between processes."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            files.directory,
            config=config,
            dtype=dtype,
            attn_implementation="slab",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"the torch engine cannot load {files.directory}: {reason}") from error
    if missing := sorted(loading["missing_keys"]) + sorted(loading["mismatched_keys"]):
        raise ConfigError(f"the weights in {files.directory} lack {missing[0]} and {len(missing) - 1} more")
    return model
