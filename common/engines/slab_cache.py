"""KV memory that the model writes into, and the attention that reads it where it lies.

Decides how a slot or lane looks to the model: a cache whose layers are views of memory that somebody else
owns, so that nothing is copied or joined. Called by `torch_engine` on the compute thread. It must never read
a position that was not written: what lies behind the end of a prompt may be any bytes.

Attention over the strided wire layout and over the head-major one gives the same bits (a test holds this),
so a prompt computed in a slot and one computed in a lane lead to the same tokens.
"""

from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from common.errors import ConfigError
from common.kv_layout import KvLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# numpy has no bfloat16: its bits travel as uint16 and are renamed here.
_NUMPY_DTYPES = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}

# What a model may ask of its attention beyond a causal mask and a scale. None of it is done here.
_OTHER_ATTENTION = ("sliding_window", "softcap", "s_aux", "position_bias")


class SlabLayer(CacheLayerMixin):
    """One layer's keys and values, `[1, kv_head, max_tokens, head_dim]` each, strided as they lie.

    `start` is the position at which the next `update` writes.
    """

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True
        self.start = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The memory was there before the layer."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new positions into the slab; return all positions up to them, as views."""
        count = key_states.shape[2]
        self.keys.narrow(2, self.start, count).copy_(key_states)
        self.values.narrow(2, self.start, count).copy_(value_states)
        end = self.start + count
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.start + query_length, 0

    def get_seq_length(self) -> int:
        return self.start

    def get_max_length(self) -> int:
        return self.keys.shape[2]


class SlabCache(Cache):
    """The cache of one slot or lane.

    `memory` is `[layer, 2, kv_head, max_tokens, head_dim]`, of any strides; the cache never copies it.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__(layers=[SlabLayer(layer[0:1], layer[1:2]) for layer in memory])

    def begin(self, start: int) -> None:
        """Say where the next forward pass writes."""
        for layer in self.layers:
            layer.start = start


def slot_memory(buffer: memoryview, layout: KvLayout) -> torch.Tensor:
    """A slot's bytes in wire layout as `[layer, 2, kv_head, max_tokens, head_dim]`, without a copy.

    Goes through numpy, which keeps the buffer exported: the slab cannot be unmapped under the tensor.
    """
    flat = np.frombuffer(buffer, dtype=_NUMPY_DTYPES[layout.dtype])
    wire = torch.from_numpy(flat).view(TORCH_DTYPES[layout.dtype]).view(layout.shape)
    return wire.transpose(2, 3)


def wire_piece(piece: np.ndarray, dtype: str) -> torch.Tensor:
    """KV as it arrives, `[layer, 2, token, kv_head, head_dim]`, as `[layer, 2, kv_head, token, head_dim]`.

    A view of `piece`, which may be read-only.
    """
    return torch.from_dlpack(piece).view(TORCH_DTYPES[dtype]).transpose(2, 3)


def as_wire(kv: torch.Tensor) -> np.ndarray:
    """KV as a lane holds it, `[layer, 2, kv_head, token, head_dim]`, as it travels; a copy."""
    wire = kv.transpose(2, 3).clone(memory_format=torch.contiguous_format)
    return (wire.view(torch.uint16) if wire.dtype == torch.bfloat16 else wire).numpy()


class CausalBand:
    """Additive masks of chunks that continue behind earlier positions, all cut from one small matrix.

    Row `r` of a chunk at `start` may look at positions up to `start + r`. In a matrix that is 0 up to column
    `max_tokens + r` and minus infinity behind, that is the window that begins at column `max_tokens - start`.
    """

    def __init__(self, chunk_tokens: int, max_tokens: int, dtype: torch.dtype) -> None:
        shape = (chunk_tokens, max_tokens + chunk_tokens)
        self._band = torch.full(shape, float("-inf"), dtype=dtype).triu_(max_tokens + 1)
        self._max_tokens = max_tokens

    def mask(self, start: int, end: int) -> torch.Tensor | None:
        """Mask of positions `[start, end)`, `[1, 1, end - start, end]`; None where none is needed."""
        if start == 0 or end - start == 1:
            return None
        offset = self._max_tokens - start
        return self._band[: end - start, offset : offset + end][None, None]


def slab_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of query `[1, head, q, dim]` over `[1, kv_head, end, dim]`: `[1, q, head, dim]`.

    Without a mask the queries are one token, or all positions from 0. Unlike the attention that transformers
    brings, it never repeats the KV heads, with a mask either. Raises ConfigError for attention of another
    kind, which the check at load brings to light.
    """
    for name in _OTHER_ATTENTION:
        if kwargs.get(name) is not None:
            raise ConfigError(f"the model's attention uses {name}, which the torch engine does not support")
    count = query.shape[2]
    if attention_mask is None and count not in (1, key.shape[2]):
        raise ConfigError("the model makes its own attention mask, which the torch engine does not support")
    shape = query.shape
    if count == 1 and query.dtype != torch.float32:
        # The heads of a group as rows of one query: five times faster over 768 positions in bfloat16. In
        # float32 it gains nothing, and the plain form has the bits of transformers' own attention.
        query = query.reshape(1, key.shape[1], -1, shape[3])
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        scale=scaling,
        is_causal=attention_mask is None and count > 1,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.reshape(shape[0], shape[1], count, -1).transpose(1, 2).contiguous(), None
