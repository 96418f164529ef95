"""KV of one form made into KV of another: number format, RoPE form, order of heads.

Decides what a conversion does to the bytes, and which numbers it refuses; called by whichever node converts,
on its compute thread, with wire pieces `[layer_count, 2, token_count, kv_heads, width]` (K, then V). It must
never change KV whose form is already right, and never alter a number beyond what its format asks for without
saying so.

What each format does to a number x (float32 holds all of them exactly):

    bfloat16   nearest, ties to even: off by at most 2^-8 |x| or, where that is less, by 2^-134
    float16    nearest, ties to even: off by at most 2^-11 |x| or, where that is less, by 2^-25
    int8       for each token and head, K and V apart: scale = max |x| / 127, value = round(x / scale); off by
               at most half the scale. Rows whose scale would be below 2^-126 become zeros with scale 0

Infinity and NaN stay what they are in both 16-bit formats, which have them, and are refused in int8, which
has not. A finite number never becomes infinite: one too large for the format is refused. RoPE form and order
of heads move items and change none.
"""

from dataclasses import dataclass

import numpy as np

from common.errors import check
from common.kv_layout import KvLayout, check_conversion

ROPE_FORMS = ("half", "interleaved")

# The least numbers that rounding to nearest makes infinite: half a step above the largest finite one.
_BFLOAT16_LIMIT = np.float32(255.5 * 2.0**120)
_FLOAT16_LIMIT = np.float32(65_520)

_INT8_MAX = np.float32(127)
# Below it a scale loses its own precision, and 127 steps of it no longer reach the largest number.
_SCALE_MIN = np.float32(2.0**-126)


@dataclass(frozen=True, slots=True)
class KvForm:
    """How KV is written.

    dtype: as `KvLayout` has it. rope_form: `half` (element i is rotated with i + rotary_dim/2) or
    `interleaved` (2i with 2i + 1). head_order: which of the model's KV heads lies at each place, () for the
    natural order. rotary_dim: how many of a head's first elements are rotated, 0 for all.
    """

    dtype: str
    rope_form: str = "half"
    head_order: tuple[int, ...] = ()
    rotary_dim: int = 0


def describe_form(form: KvForm) -> str:
    """A form in words, for logs and STATUS."""
    words = [form.dtype, f"RoPE {form.rope_form}"]
    if form.head_order:
        words.append("heads " + ",".join(map(str, form.head_order)))
    return ", ".join(words)


class KvConverter:
    """Converts pieces of `source` form to `target` form. Raises ValueError when there is no such conversion.

    `changes_nothing` says that both forms are the same. A converter keeps no state between pieces.
    """

    def __init__(self, source: KvForm, target: KvForm, head_dim: int) -> None:
        check_conversion(source.dtype, target.dtype)
        self._source, self._target = source, target
        self._source_layout = KvLayout(1, 1, head_dim, source.dtype, 1)
        self._target_layout = KvLayout(1, 1, head_dim, target.dtype, 1)
        self._head_dim = head_dim
        self._heads = _head_places(source.head_order, target.head_order)
        self._rotated = _rotated_elements(source, target, head_dim)
        self.changes_nothing = source.dtype == target.dtype and not self._heads and not self._rotated

    def convert(self, piece: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """The piece in target form, in `out` if given, else in new memory or, when nothing changes, as it is.

        `piece` may be read-only and strided, but the items of a head lie together; `out` must not overlap it.
        Raises ValueError, naming the fault, for a number that the target format does not have.
        """
        self._check_shape(piece, self._source_layout)
        if out is None and self.changes_nothing:
            return piece
        if out is None:
            shape = (*piece.shape[:-1], self._target_layout.width)
            out = np.empty(shape, dtype=self._target_layout.numpy_dtype)
        self._check_shape(out, self._target_layout)
        check(out.shape[:-1] == piece.shape[:-1], f"KV of shape {piece.shape} into {out.shape}")
        # Layer by layer, so that what is between two steps stays in the cache.
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for layer, layer_out in zip(piece, out, strict=True):
                self._translate(self._rearrange(layer), layer_out)
        return out

    def _check_shape(self, piece: np.ndarray, layout: KvLayout) -> None:
        check(
            piece.ndim == 5 and piece.shape[1] == 2 and piece.shape[4] == layout.width,
            f"a KV piece of shape {piece.shape}, not [layer, 2, token, kv_head, {layout.width}]",
        )
        check(piece.dtype == layout.numpy_dtype, f"a {layout.dtype} piece of items {piece.dtype}")
        heads = len(self._heads) or piece.shape[3]
        check(piece.shape[3] == heads, f"a KV piece of {piece.shape[3]} heads, not {heads}")

    def _rearrange(self, layer: np.ndarray) -> np.ndarray:
        """`layer` (`[2, token, kv_head, width]`) with heads and K's elements where the target has them."""
        if self._heads:
            layer = layer.take(self._heads, axis=2)
        elif self._rotated:
            layer = layer.copy()
        if self._rotated:
            keys = layer[0, ..., : self._rotated]
            before, middle = keys.copy(), self._rotated // 2
            if self._target.rope_form == "interleaved":
                keys[..., 0::2], keys[..., 1::2] = before[..., :middle], before[..., middle:]
            else:
                keys[..., :middle], keys[..., middle:] = before[..., 0::2], before[..., 1::2]
        return layer

    def _translate(self, layer: np.ndarray, out: np.ndarray) -> None:
        """Write `layer` into `out` in the target's number format."""
        if self._source.dtype == self._target.dtype:
            out[...] = layer
            return
        numbers = layer
        if self._source.dtype != "float32":
            shape = (*layer.shape[:-1], self._head_dim)
            numbers = out if self._target.dtype == "float32" else np.empty(shape, dtype=np.float32)
            _DECODERS[self._source.dtype](layer, numbers)
        if self._target.dtype != "float32":
            _ENCODERS[self._target.dtype](numbers, out)


def _head_places(source: tuple[int, ...], target: tuple[int, ...]) -> list[int]:
    """Where the source has each head of the target; empty if both have the same order."""
    natural = tuple(range(len(source) or len(target)))
    source, target = source or natural, target or natural
    for order in (source, target):
        if sorted(order) != list(natural):
            raise ValueError(f"head order {order} is none of {len(natural)} KV heads")
    return [] if source == target else [source.index(head) for head in target]


def _rotated_elements(source: KvForm, target: KvForm, head_dim: int) -> int:
    """How many of a head's first elements change their places; 0 if the RoPE forms are the same."""
    for form in (source, target):
        if form.rope_form not in ROPE_FORMS:
            raise ValueError(f"there is no RoPE form {form.rope_form!r}: use one of {', '.join(ROPE_FORMS)}")
    rotated = [form.rotary_dim or head_dim for form in (source, target)]
    if rotated[0] != rotated[1]:
        raise ValueError(f"one side rotates {rotated[0]} elements of each head, the other {rotated[1]}")
    if source.rope_form == target.rope_form:
        return 0
    if rotated[0] % 2 or rotated[0] > head_dim:
        raise ValueError(f"{rotated[0]} rotated elements of a head of {head_dim} make no pairs")
    return rotated[0]


def _decode_float16(layer: np.ndarray, numbers: np.ndarray) -> None:
    numbers[...] = layer


def _decode_bfloat16(layer: np.ndarray, numbers: np.ndarray) -> None:
    np.left_shift(layer, np.uint32(16), out=numbers.view(np.uint32), dtype=np.uint32)


def _decode_int8(layer: np.ndarray, numbers: np.ndarray) -> None:
    head_dim = numbers.shape[-1]
    scales = layer[..., head_dim:].view("<f4")
    np.multiply(layer[..., :head_dim].view(np.int8), scales, out=numbers)


def _encode_float16(numbers: np.ndarray, out: np.ndarray) -> None:
    if not _all_below(numbers, _FLOAT16_LIMIT):
        _refuse_overflow(numbers, _FLOAT16_LIMIT, "float16")
    np.copyto(out, numbers, casting="unsafe")


def _encode_bfloat16(numbers: np.ndarray, out: np.ndarray) -> None:
    bits = numbers.view(np.uint32)
    # Just under half of the last bit kept, and that bit itself: a carry rounds to nearest, ties to even.
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    np.copyto(out, rounded, casting="unsafe")
    if not _all_below(numbers, _BFLOAT16_LIMIT):
        _refuse_overflow(numbers, _BFLOAT16_LIMIT, "bfloat16")
        # The carry may run through a NaN's mantissa: those are cut instead, and stay NaN by their first bit.
        not_a_number = np.isnan(numbers)
        out[not_a_number] = (bits[not_a_number] >> np.uint32(16)) | np.uint32(0x40)


def _encode_int8(numbers: np.ndarray, out: np.ndarray) -> None:
    head_dim = numbers.shape[-1]
    scales = np.abs(numbers).max(axis=-1, keepdims=True, initial=0) / _INT8_MAX
    if not np.isfinite(scales * _INT8_MAX).all():
        raise ValueError("KV that is infinite, not a number or too large cannot become int8")
    scales[scales < _SCALE_MIN] = 0
    steps = numbers / np.where(scales == 0, np.float32(np.inf), scales)
    np.copyto(out[..., :head_dim].view(np.int8), np.rint(steps, out=steps), casting="unsafe")
    out[..., head_dim:].view("<f4")[...] = scales


def _all_below(numbers: np.ndarray, limit: np.float32) -> bool:
    """Whether all |numbers| are below the limit; False also if one is NaN."""
    return bool(numbers.max(initial=0) < limit and numbers.min(initial=0) > -limit)


def _refuse_overflow(numbers: np.ndarray, limit: np.float32, dtype: str) -> None:
    magnitudes = np.abs(numbers)
    too_large = magnitudes[np.isfinite(numbers) & (magnitudes >= limit)]
    if too_large.size:
        raise ValueError(f"KV of magnitude {too_large.max():.6g} is too large for {dtype}")


_DECODERS = {"float16": _decode_float16, "bfloat16": _decode_bfloat16, "int8": _decode_int8}
_ENCODERS = {"float16": _encode_float16, "bfloat16": _encode_bfloat16, "int8": _encode_int8}
