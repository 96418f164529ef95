"""The shape of KV bytes on the wire and in the slab, as arithmetic.

Decides where the bytes of a token lie, and which number formats may follow one another; used by the slab,
both engines, the import and the configuration. It knows no tensor library: engines convert at their own edge,
`common/kv_convert.py` between them.

Wire layout (docs/protocol.md): per layer, K then V, `[token][kv_head][head_dim]`, dtype named. A slot holds
`[layer][2][max_tokens][kv_head][head_dim]` with no padding, so one (layer, K or V) run of a chunk is
contiguous. In int8 each head of a token is a row of bytes: head_dim numbers, then their scale as one float32.
All items are little-endian.
"""

from dataclasses import dataclass

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}
SCALE_BYTES = 4

# What any engine's KV may be sent as; uint8 is the emulated engine's opaque bytes.
WIRE_DTYPES = ("float32", "bfloat16", "float16", "int8")

# numpy has no bfloat16: its bits are uint16 there. Strings, because numpy would make --help wait.
_NUMPY_TYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "uint8": "u1"}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Geometry of one slot. `dtype` is a key of `ITEM_BYTES` or int8; `max_tokens` is the slot's capacity."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    max_tokens: int

    @property
    def item_type(self) -> str:
        """What an array of this layout has as items: the dtype, but bytes for int8 and its scales."""
        return "uint8" if self.dtype == "int8" else self.dtype

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.item_type]

    @property
    def numpy_dtype(self) -> str:
        """Name of numpy's dtype of the items."""
        return _NUMPY_TYPES[self.item_type]

    @property
    def width(self) -> int:
        """Items of one head of one token, K or V alone."""
        return self.head_dim + (SCALE_BYTES if self.dtype == "int8" else 0)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer, K or V alone."""
        return self.kv_heads * self.width * self.item_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, K and V."""
        return 2 * self.layers * self.row_bytes

    @property
    def slot_bytes(self) -> int:
        return self.max_tokens * self.token_bytes

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape of a slot as an array: `[layer, 2, token, kv_head, width]`."""
        return (self.layers, 2, self.max_tokens, self.kv_heads, self.width)


def check_conversion(source_dtype: str, target_dtype: str) -> None:
    """Raise ValueError, saying what would be right, unless KV of the one dtype can become the other."""
    if source_dtype == target_dtype and source_dtype in (*WIRE_DTYPES, "uint8"):
        return
    for dtype in (source_dtype, target_dtype):
        if dtype == "uint8":
            raise ValueError(
                f"KV of dtype {source_dtype} cannot become {target_dtype}: an emulated backend's entries are "
                f"bytes, not numbers, and go only as they are"
            )
        if dtype not in WIRE_DTYPES:
            raise ValueError(f"there is no KV dtype {dtype!r}: use one of {', '.join(WIRE_DTYPES)}")


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
