"""A decoder-only Hugging Face model whose KV cache is the slab itself.

Decides what a real model computes on either side; loaded through `common/engines/registry.py`, driven by one
compute thread. A prefill engine writes into slots (wire layout), a decode engine into lanes (head-major,
which reads faster one token at a time). It must never read KV beyond what was declared, and never serve a
model that keeps anything but an ordinary KV cache: such a model is refused at load, by its configuration and
by a check that chunked computation through the slab gives the logits of plain computation.
"""

from dataclasses import replace
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
from common.engines.model_files import ModelFiles, resolve_model
from common.engines.registry import EngineSettings
from common.engines.slab_cache import (
    TORCH_DTYPES,
    CausalBand,
    SlabCache,
    as_wire,
    slab_attention,
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

_INTERLEAVED_ROPE = {"codegen", "cohere", "cohere2", "ernie4_5", "glm", "glm4", "gptj"}

AttentionInterface.register("slab", slab_attention)


class _Model:
    """The loaded model, and one forward pass over a cache. Raises ConfigError for a model it cannot serve."""

    def __init__(self, settings: EngineSettings, lanes: int) -> None:
        torch.set_num_threads(settings.threads)
        files = resolve_model(settings.model)
        self._config = _ordinary_config(files)
        self.capabilities = _capabilities(settings, files, self._config, lanes)
        dtype = TORCH_DTYPES[settings.dtype]
        self._model = _load(files, self._config, dtype)
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

    def prefill_chunk(
        self, cache: SlabCache, token_ids: np.ndarray, start: int, end: int
    ) -> np.ndarray | None:
        """As `PrefillEngine.prefill_chunk`, into `cache`."""
        check(0 <= start < end <= len(token_ids), f"chunk [{start}, {end}) of {len(token_ids)} tokens")
        check(end - start <= self.capabilities.chunk_tokens, f"a chunk of {end - start} tokens")
        chunk = torch.tensor(token_ids[start:end], dtype=torch.int64)
        return self.forward(cache, chunk, start, with_logits=end == len(token_ids))

    def warm_up(self, cache: SlabCache) -> int:
        """Check the model through `cache` and time a chunk; returns the bound of a chunk's time in ms.

        Raises ConfigError when the model cannot run this way or gives other logits than without a cache.
        """
        # Ids from all over the vocabulary: the first few are special, and odd in bfloat16.
        count = min(8, self.capabilities.max_tokens)
        ids = np.linspace(0, self.capabilities.identity.vocab_size, count + 2, dtype=np.int64)[1:-1]
        bounds = [(0, 1), (1, len(ids) - 1), (len(ids) - 1, len(ids))]
        try:
            with torch.inference_mode():
                plain = self._model(torch.from_numpy(ids)[None], use_cache=False).logits[0, -1].float()
            for start, end in (pair for pair in bounds if pair[0] < pair[1]):
                chunked = self.prefill_chunk(cache, ids, start, end)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"the torch engine cannot run this model: {error}") from error
        difference = float((plain - torch.from_numpy(chunked)).square().mean().sqrt() / plain.std())
        if not difference < _TOLERANCE[self.capabilities.dtype]:
            raise ConfigError(
                f"this model does not keep an ordinary KV cache: computing in chunks changes its logits "
                f"by {difference:.2g} of their spread"
            )
        return self._chunk_bound_ms(cache)

    def _chunk_bound_ms(self, cache: SlabCache) -> int:
        """An upper bound of a chunk's time: that of a full one, made longer by attention at full length."""
        declared = self.capabilities
        ids = np.zeros(declared.chunk_tokens + 1, dtype=np.int64)
        began_us = clock.now_us()
        self.prefill_chunk(cache, ids, 0, declared.chunk_tokens)
        measured_ms = (clock.now_us() - began_us) / 1000
        # Per token: 4 operations per layer, position and query element, against 2 per weight.
        query_elements = self._config.num_attention_heads * declared.identity.head_dim
        attention = 2 * declared.max_tokens * query_elements * declared.identity.layers
        longest_ms = measured_ms * (1 + attention / self._model.num_parameters())
        return max(LONGEST_CHUNK_MS_MIN, round(STALL_FACTOR * longest_ms))


class TorchPrefillEngine:
    """`PrefillEngine` of a Hugging Face model: the slab's slots are its KV cache."""

    def __init__(self, settings: EngineSettings) -> None:
        self._model = _Model(settings, lanes=0)
        layout = self._model.capabilities.layout
        scratch = slot_memory(memoryview(bytearray(layout.slot_bytes)), layout)
        self.capabilities = replace(
            self._model.capabilities, longest_chunk_ms=self._model.warm_up(SlabCache(scratch))
        )
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
    """`DecodeEngine` of a Hugging Face model. Lanes are computed one after another."""

    def __init__(self, settings: EngineSettings) -> None:
        self._model = _Model(settings, settings.lanes)
        layout = self._model.capabilities.layout
        layers, _, max_tokens, kv_heads, head_dim = layout.shape
        self._memory = torch.zeros(
            (layers, 2, settings.lanes, kv_heads, max_tokens, head_dim), dtype=TORCH_DTYPES[layout.dtype]
        )
        self._lanes = [SlabCache(self._memory[:, :, lane]) for lane in range(settings.lanes)]
        self._lengths = [0] * settings.lanes
        self.capabilities = replace(
            self._model.capabilities, longest_chunk_ms=self._model.warm_up(self._lanes[0])
        )

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
        logits = []
        for lane, token_id in zip(lanes, token_ids, strict=True):
            position = self._lengths[lane]
            token = torch.tensor([token_id])
            logits.append(self._model.forward(self._lanes[lane], token, position, with_logits=True))
            self._lengths[lane] = position + 1
        return np.stack(logits)

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
