"""Conversion of KV between number formats, RoPE forms and orders of heads.

Expected numbers come from Python's own struct module and from plain loops, never from the converter.
"""

import itertools
import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from common.errors import InvariantViolation
from common.kv_convert import KvConverter, KvForm
from common.kv_layout import WIRE_DTYPES, KvLayout, check_conversion

HEAD_DIM = 8
PAIRS = [pair for pair in itertools.product(WIRE_DTYPES, WIRE_DTYPES) if pair[0] != pair[1]]
quick = settings(max_examples=60, deadline=None)


@st.composite
def pieces(draw: st.DrawFn, limit: float = 60_000.0) -> np.ndarray:
    """float32 KV of any shape, empty ones too, whose magnitudes reach the limit."""
    shape = (draw(st.integers(0, 2)), 2, draw(st.integers(0, 3)), draw(st.integers(1, 3)), HEAD_DIM)
    low, high = (float(np.float32(bound)) for bound in (-limit, limit))
    return draw(arrays.arrays(np.float32, shape, elements=st.floats(low, high, width=32)))


def convert(piece: np.ndarray, source: str | KvForm, target: str | KvForm) -> np.ndarray:
    forms = [KvForm(form) if isinstance(form, str) else form for form in (source, target)]
    return KvConverter(*forms, HEAD_DIM).convert(piece)


def encoded(numbers: np.ndarray, dtype: str) -> np.ndarray:
    return convert(numbers, "float32", dtype)


def one_head(*numbers: float) -> np.ndarray:
    """KV of one layer, token and head: the numbers in K, zeros behind them and in V."""
    piece = np.zeros((1, 2, 1, 1, HEAD_DIM), dtype=np.float32)
    piece[0, 0, 0, 0, : len(numbers)] = numbers
    return piece


def bfloat16_bits(number: float) -> int:
    """The nearest bfloat16, ties to even, by comparing the two neighbours in exact arithmetic."""
    low = struct.unpack("<I", struct.pack("<f", number))[0] >> 16
    value, above = (struct.unpack("<f", struct.pack("<I", bits << 16))[0] for bits in (low, low + 1))
    above = math.copysign(2.0**128, number) if math.isinf(above) else above
    down, up = abs(number - value), abs(above - number)
    return low + (up < down or (up == down and low % 2))


@quick
@given(piece=pieces(limit=3.3e38))
def test_bfloat16_is_the_nearest_number_and_half_of_a_tie_goes_to_even(piece: np.ndarray) -> None:
    bits = encoded(piece, "bfloat16")
    assert bits.dtype == np.uint16
    assert bits.ravel().tolist() == [bfloat16_bits(number) for number in piece.ravel().tolist()]
    back = convert(bits, "bfloat16", "float32")
    assert (np.abs(back - piece) <= np.maximum(np.abs(piece.astype(float)) * 2.0**-8, 2.0**-134)).all()


@pytest.mark.parametrize("low_half", [0x0000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
@pytest.mark.parametrize("high_half", [0x0000, 0x0001, 0x3F80, 0x3F81, 0xBFFF, 0x7F7E])
def test_bfloat16_rounds_at_every_border(high_half: int, low_half: int) -> None:
    number = struct.unpack("<f", struct.pack("<I", high_half << 16 | low_half))[0]
    assert encoded(one_head(number), "bfloat16")[0, 0, 0, 0, 0] == bfloat16_bits(number)


@quick
@given(piece=pieces(limit=65_519.0))
def test_float16_is_the_nearest_number(piece: np.ndarray) -> None:
    half = encoded(piece, "float16")
    rounded = [max(-65_504.0, min(65_504.0, number)) for number in piece.ravel().tolist()]
    assert half.ravel().tolist() == [struct.unpack("<e", struct.pack("<e", item))[0] for item in rounded]
    back = convert(half, "float16", "float32")
    assert (np.abs(back - piece) <= np.maximum(np.abs(piece) * 2.0**-11, 2.0**-25)).all()


@quick
@given(piece=pieces(limit=3e38))
def test_int8_is_off_by_at_most_half_its_scale(piece: np.ndarray) -> None:
    rows = encoded(piece, "int8")
    back = convert(rows, "int8", "float32")
    assert rows.dtype == np.uint8
    assert rows.shape == (*piece.shape[:-1], HEAD_DIM + 4)
    by_row = [array.reshape(-1, array.shape[-1]) for array in (piece.astype(float), rows, back)]
    for numbers, row, decoded in zip(*by_row, strict=True):
        *values, scale = struct.unpack(f"<{HEAD_DIM}bf", row.tobytes())
        assert scale == pytest.approx(np.abs(numbers).max() / 127, rel=1e-6, abs=2.0**-126)
        assert decoded.tolist() == [np.float32(value) * np.float32(scale) for value in values]
        assert np.abs(decoded - numbers).max() <= scale * (0.5 + 1e-4) + 2.0**-119


def test_int8_is_symmetric_and_scaled_for_each_head_alone() -> None:
    piece = np.zeros((1, 2, 2, 2, HEAD_DIM), dtype=np.float32)
    piece[0, 0, 0, 0, :3] = (127, -127, 12.4)
    piece[0, 1, 1, 1, :2] = (-0.254, 0.127)
    rows = encoded(piece, "int8")
    assert rows[0, 0, 0, 0].tobytes() == struct.pack("<8bf", 127, -127, 12, 0, 0, 0, 0, 0, 1.0)
    assert rows[0, 1, 1, 1, :2].view(np.int8).tolist() == [-127, 64]  # 63.5 to even
    assert rows[0, 1, 0].tobytes() == bytes(2 * (HEAD_DIM + 4))
    assert np.array_equal(convert(rows, "int8", "float32")[0, 1, 0], piece[0, 1, 0])


@pytest.mark.parametrize("peak", [1e-45, 1.1e-38, 2.0**-119.5])
def test_int8_of_numbers_that_no_scale_can_hold_is_zero(peak: float) -> None:
    rows = encoded(one_head(peak, -peak), "int8")
    assert not rows.any()
    assert not convert(rows, "int8", "float32").any()


@quick
@given(bits=arrays.arrays(np.uint16, (1, 2, 2, 1, HEAD_DIM)))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_pattern_of_16_bits_survives_the_way_through_float32(bits: np.ndarray, dtype: str) -> None:
    """NaN stays NaN; its payload may change."""
    piece = bits.view(KvLayout(1, 1, 1, dtype, 1).numpy_dtype)
    wide = convert(piece, dtype, "float32")
    again = convert(wide, "float32", dtype)
    not_a_number = np.isnan(wide)
    assert np.array_equal(again.view(np.uint16)[~not_a_number], bits[~not_a_number])
    assert np.isnan(convert(again, dtype, "float32")[not_a_number]).all()


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001, 0x7FC00000, 0x7F80FFFF])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_nan_stays_nan_whatever_its_bits(bits: int, dtype: str) -> None:
    piece = one_head(1.0)
    piece.view(np.uint32)[0, 1, 0, 0, 3] = bits
    back = convert(encoded(piece, dtype), dtype, "float32")
    assert np.isnan(back[0, 1, 0, 0, 3])
    assert np.isnan(back).sum() == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_infinity_stays_infinite(dtype: str) -> None:
    back = convert(encoded(one_head(np.inf, -np.inf, 2.0), dtype), dtype, "float32")
    assert back[0, 0, 0, 0, :4].tolist() == [np.inf, -np.inf, 2.0, 0.0]


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        ("float16", 65_520.0),
        ("float16", -1e6),
        ("bfloat16", 3.397e38),
        ("bfloat16", -3.4028234e38),
        ("int8", np.inf),
        ("int8", -np.inf),
        ("int8", np.nan),
    ],
)
@pytest.mark.parametrize("others", [(), (np.nan,), (np.inf,)])
def test_a_number_that_the_format_does_not_have_is_refused(dtype: str, number: float, others: tuple) -> None:
    piece = np.concatenate([one_head(1.0), one_head(1.0, number, *others)])
    with pytest.raises(ValueError, match=dtype):
        encoded(piece, dtype)


@pytest.mark.parametrize(("dtype", "largest"), [("float16", 65_504.0), ("bfloat16", 255 * 2.0**120)])
def test_the_largest_number_of_a_format_passes(dtype: str, largest: float) -> None:
    piece = one_head(largest, -largest)
    assert np.array_equal(convert(encoded(piece, dtype), dtype, "float32"), piece)


def test_int8_refuses_the_one_number_whose_decoding_would_be_infinite() -> None:
    largest = np.finfo(np.float32).max
    with pytest.raises(ValueError, match="too large"):
        encoded(one_head(largest), "int8")
    for number in (np.nextafter(largest, np.float32(0)), largest * np.float32(1 - 2.0**-20)):
        decoded = convert(encoded(one_head(-number), "int8"), "int8", "float32")[0, 0, 0, 0, 0]
        assert decoded == pytest.approx(-number, rel=1e-6)


@pytest.mark.parametrize(("source", "target"), PAIRS)
@quick
@given(piece=pieces())
def test_any_pair_is_the_way_through_float32(source: str, target: str, piece: np.ndarray) -> None:
    start = encoded(piece, source)
    through = encoded(convert(start, source, "float32"), target)
    direct = convert(start, source, target)
    assert direct.dtype == KvLayout(1, 1, 1, target, 1).numpy_dtype
    assert direct.shape == through.shape
    assert direct.tobytes() == through.tobytes()


@pytest.mark.parametrize("dtype", [*WIRE_DTYPES, "uint8"])
def test_equal_forms_give_the_very_piece(dtype: str) -> None:
    layout = KvLayout(2, 3, HEAD_DIM, dtype, 4)
    piece = np.frombuffer(b"\xff" * layout.slot_bytes, layout.numpy_dtype).reshape(layout.shape)
    converter = KvConverter(KvForm(dtype), KvForm(dtype, head_order=(0, 1, 2)), HEAD_DIM)
    assert converter.changes_nothing
    assert converter.convert(piece) is piece
    copy = np.empty_like(piece)
    assert converter.convert(piece, copy) is copy
    assert copy.tobytes() == piece.tobytes()


def noise(dtype: str, tokens: int = 5, heads: int = 3) -> np.ndarray:
    """Two layers of KV in that dtype, every number another."""
    if dtype == "uint8":
        return np.random.default_rng(1).integers(0, 256, (2, 2, tokens, heads, HEAD_DIM), dtype=np.uint8)
    numbers = np.random.default_rng(1).standard_normal((2, 2, tokens, heads, HEAD_DIM), dtype=np.float32)
    return encoded(numbers, dtype)


@pytest.mark.parametrize("dtype", [*WIRE_DTYPES, "uint8"])
@pytest.mark.parametrize("rotary_dim", [0, 4])
def test_rope_form_moves_the_elements_of_k_alone_and_back(dtype: str, rotary_dim: int) -> None:
    half, interleaved = (KvForm(dtype, form, (), rotary_dim) for form in ("half", "interleaved"))
    piece = noise(dtype)
    changed = convert(piece, half, interleaved)
    assert np.array_equal(changed[:, 1], piece[:, 1])
    order = [0, 4, 1, 5, 2, 6, 3, 7] if rotary_dim == 0 else [0, 2, 1, 3, 4, 5, 6, 7]
    for place, element in enumerate(order):
        assert np.array_equal(changed[:, 0, ..., place], piece[:, 0, ..., element])
    assert np.array_equal(changed[..., HEAD_DIM:], piece[..., HEAD_DIM:])  # the scales of int8
    assert convert(changed, interleaved, half).tobytes() == piece.tobytes()


def test_attention_is_the_same_in_both_rope_forms() -> None:
    """Rotated pair by pair in either form, keys give the same products with queries rotated alike."""
    query, key = np.random.default_rng(2).standard_normal((2, HEAD_DIM))
    products = []
    for pairs in ([(i, i + 4) for i in range(4)], [(2 * i, 2 * i + 1) for i in range(4)]):
        rotated = []
        for vector, position in ((query, 9), (key, 4)):
            if pairs[0] == (0, 1):
                vector = convert(one_head(*vector), "float32", KvForm("float32", "interleaved"))[0, 0, 0, 0]
            turned = np.array(vector, dtype=float)
            for number, (first, second) in enumerate(pairs):
                angle = position * 10_000.0 ** (-2 * number / HEAD_DIM)
                real, imaginary = vector[first], vector[second]
                turned[first] = real * math.cos(angle) - imaginary * math.sin(angle)
                turned[second] = real * math.sin(angle) + imaginary * math.cos(angle)
            rotated.append(turned)
        products.append(rotated[0] @ rotated[1])
    assert products[0] == pytest.approx(products[1], rel=1e-5)


@pytest.mark.parametrize("dtype", [*WIRE_DTYPES, "uint8"])
@pytest.mark.parametrize("source", list(itertools.permutations(range(3))))
def test_each_head_goes_to_its_place(dtype: str, source: tuple[int, ...]) -> None:
    piece = noise(dtype)
    for target in itertools.permutations(range(3)):
        changed = convert(piece, KvForm(dtype, head_order=source), KvForm(dtype, head_order=target))
        for place, head in enumerate(target):
            assert np.array_equal(changed[:, :, :, place], piece[:, :, :, source.index(head)])


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_all_three_conversions_at_once_are_those_one_by_one(source: str, target: str) -> None:
    piece = noise(source)
    whole = convert(piece, KvForm(source, "half", (2, 0, 1)), KvForm(target, "interleaved"))
    steps = convert(piece, KvForm(source, head_order=(2, 0, 1)), KvForm(source))
    steps = convert(steps, KvForm(source), KvForm(source, "interleaved"))
    steps = convert(steps, source, target)
    assert whole.tobytes() == steps.tobytes()
    assert whole.flags.c_contiguous


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("form", [{}, {"rope_form": "interleaved", "head_order": (1, 2, 0)}])
def test_a_view_into_a_read_only_slot_converts_like_a_copy(source: str, target: str, form: dict) -> None:
    slot = noise(source, tokens=9)
    before = slot.tobytes()
    slot.flags.writeable = False
    view = slot[:, :, 2:7]
    converter = KvConverter(KvForm(source), KvForm(target, **form), HEAD_DIM)
    expected = converter.convert(view.copy())
    assert np.array_equal(converter.convert(view), expected)
    room = np.zeros((2, 2, 11, 3, expected.shape[-1]), dtype=expected.dtype)
    converter.convert(view, room[:, :, 3:8])
    assert np.array_equal(room[:, :, 3:8], expected)
    assert not room[:, :, :3].any()
    assert not room[:, :, 8:].any()
    assert slot.tobytes() == before


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("uint8", "int8", "emulated"),
        ("float32", "uint8", "emulated"),
        ("float32", "float8", "'float8'"),
        ("float64", "float64", "'float64'"),
    ],
)
def test_dtypes_that_cannot_follow_each_other_are_named(source: str, target: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_conversion(source, target)
    with pytest.raises(ValueError, match=words):
        KvConverter(KvForm(source), KvForm(target), HEAD_DIM)


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ({"head_order": (0, 0)}, {}, r"\(0, 0\) is none of 2"),
        ({"head_order": (0, 1)}, {"head_order": (2, 1, 0)}, "none of 2"),
        ({"rope_form": "spiral"}, {"rope_form": "spiral"}, "'spiral'"),
        ({"rotary_dim": 4}, {}, "rotates 4 elements of each head, the other 8"),
        ({"rotary_dim": 3}, {"rotary_dim": 3, "rope_form": "interleaved"}, "make no pairs"),
        ({"rotary_dim": 10}, {"rotary_dim": 10, "rope_form": "interleaved"}, "make no pairs"),
    ],
)
def test_forms_that_make_no_sense_together_are_refused(source: dict, target: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KvConverter(KvForm("float32", **source), KvForm("float32", **target), HEAD_DIM)


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((1, 2, 1, 2, HEAD_DIM), dtype=np.float32),
        np.zeros((1, 2, 1, 3, HEAD_DIM + 1), dtype=np.float16),
        np.zeros((2, 1, 3, HEAD_DIM), dtype=np.float16),
        np.zeros((1, 2, 1, 2, HEAD_DIM), dtype=np.float16),
        np.zeros((1, 1, 1, 3, HEAD_DIM), dtype=np.float16),
    ],
)
def test_a_piece_of_another_shape_is_our_bug(wrong: np.ndarray) -> None:
    converter = KvConverter(KvForm("float16"), KvForm("bfloat16", head_order=(1, 0, 2)), HEAD_DIM)
    with pytest.raises(InvariantViolation):
        converter.convert(wrong)
    with pytest.raises(InvariantViolation):
        converter.convert(noise("float16"), np.zeros((2, 2, 4, 3, HEAD_DIM), dtype=np.uint16))


@pytest.mark.parametrize("dtype", [*WIRE_DTYPES, "uint8"])
def test_the_layout_counts_the_bytes_that_conversion_makes(dtype: str) -> None:
    layout = KvLayout(2, 3, HEAD_DIM, dtype, 5)
    piece = noise(dtype)
    assert piece.shape == layout.shape
    assert (piece.nbytes, piece[:, :, 0].nbytes) == (layout.slot_bytes, layout.token_bytes)
    assert (piece.strides[2], piece.itemsize) == (layout.row_bytes, layout.item_bytes)
    assert piece.dtype == np.dtype(layout.numpy_dtype)
