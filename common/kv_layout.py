"""The shape of KV bytes on the wire and in the slab, as arithmetic.

Decides where the bytes of a token lie; used by the slab, both engines and the import. It knows no tensor
library: engines convert at their own edge.

Wire layout (docs/protocol.md): per layer, K then V, `[token][kv_head][head_dim]`, dtype named. A slot holds
`[layer][2][max_tokens][kv_head][head_dim]` with no padding, so one (layer, K or V) run of a chunk is
contiguous.
"""

from dataclasses import dataclass

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Geometry of one slot. `dtype` is a key of `ITEM_BYTES`; `max_tokens` is the slot's capacity."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    max_tokens: int

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer, K or V alone."""
        return self.kv_heads * self.head_dim * self.item_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, K and V."""
        return 2 * self.layers * self.row_bytes

    @property
    def slot_bytes(self) -> int:
        return self.max_tokens * self.token_bytes

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape of a slot as an array: `[layer, 2, token, kv_head, head_dim]`."""
        return (self.layers, 2, self.max_tokens, self.kv_heads, self.head_dim)


def chunk_bounds(start: int, end: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """Cut token positions `[start, end)` at multiples of `chunk_tokens`, counted from position 0.

    Counting from 0 keeps the boundaries, and so the arithmetic of a real engine, the same whatever prefix was
    already there.
    """
    bounds = []
    while start < end:
        stop = min(end, (start // chunk_tokens + 1) * chunk_tokens)
        bounds.append((start, stop))
        start = stop
    return bounds
