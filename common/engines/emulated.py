"""A model that is arithmetic on hashes: the test instrument, and the stand-in for absent hardware.

Decides what the emulated KV, logits and device timings are. Loaded by `common/engines/registry.py`
for the backends `emulated`, `rngd` and `atom`; driven by the compute threads. It must never import torch or
transformers, never read a lane beyond its length, and never depend on `--model`.

Definition, all arithmetic modulo 2^64. `tests/oracle.py` is written from this text alone:

    STEP      = 0x9E3779B97F4A7C15
    mix(x)    : x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB; x ^= x >> 31
    base      = mix(seed + STEP)
    digest[-1] = base;  digest[p] = mix(digest[p-1] + (token[p] + 1) * STEP)
    region    = (layer * 2 + (0 for K, 1 for V)) * 2 + head, for 4 layers of 2 heads
    key       = mix(base ^ ((region * 2^32 + p + 1) * STEP))
    entry     = mix(digest[p] ^ key), stored as 8 little-endian bytes (dtype uint8, head_dim 8)
    lane_hash = xxh3_64 with seed `base` over the entries of positions [0, length), ordered by layer,
                K before V, position, head
    noise[id] = (lane_hash * (mix((id + 1) * STEP) | 1)) >> 50
    logit[id] = (512 * noise[id] + id) / 2^18 + bias[id], exact in float32 and never equal for two ids
    bias      = 2 for space, 0 for a to z, -2.125 for EOS, -24 for every other id

`mix` is a bijection. So decode, which is never shown the prompt, finds the digest in the lane's last entry
and extends it, while the logits read the whole lane: one wrong, missing or foreign byte changes them.

A prefill that continues behind a prefix computes each entry of the prefix anew, from the prompt's token and
the digest found in memory one position before, and XORs lane_hash(memory) ^ lane_hash(anew) into the digest
that it continues from. That is nothing for the prompt's own prefix. Behind any other the new KV is wrong, as
when a real engine attends over it.

That is the natural form, and the one in which everything is computed. An engine told to write KV otherwise
stores byte b % 2 * 4 + b // 2 of each K entry as its byte b (`interleaved`), and head 1 before head 0
(`heads reversed`), in slots and lanes alike.

Timings are declared, not measured. Those of `rngd` and `atom` are plausible constants, not the vendors'.
"""

from dataclasses import dataclass
from math import ceil
from typing import TypeVar

import numpy as np
import xxhash

from common import clock
from common.engines.byte_tokenizer import EOS, VOCAB_SIZE
from common.engines.interface import Capabilities, ModelIdentity
from common.engines.registry import EngineSettings
from common.errors import ConfigError, check
from common.kv_convert import KvForm

LAYERS = 4
KV_HEADS = 2
HEAD_DIM = 8

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
_FACTOR_1 = 0xBF58476D1CE4E5B9
_FACTOR_2 = 0x94D049BB133111EB
_INVERSE_1 = pow(_FACTOR_1, -1, 2**64)
_INVERSE_2 = pow(_FACTOR_2, -1, 2**64)

_LOGIT_ONE = 2**18
_LIKELY_BIAS = {ord(" "): 2.0, EOS: -2.125} | dict.fromkeys(range(ord("a"), ord("z") + 1), 0.0)
_UNLIKELY_BIAS = -24.0

# A late wake-up is made up for at the next wait, but never more: a stall is not followed by a sprint.
_LATENESS_MAX_MS = 1.0
# One word, or an array of them (uint64): the arithmetic is written once for both.
Words = TypeVar("Words", int, np.ndarray)


@dataclass(frozen=True, slots=True)
class Profile:
    """Shape and declared speed of one emulated device; None marks the role that it cannot play."""

    max_tokens: int
    chunk_tokens: int
    bucketed: bool
    prefill_tokens_per_s: float | None
    decode_ms: float | None


PROFILES = {
    "emulated": Profile(1024, 128, bucketed=False, prefill_tokens_per_s=20_000.0, decode_ms=1.0),
    "rngd": Profile(2048, 256, bucketed=True, prefill_tokens_per_s=4_000.0, decode_ms=None),
    "atom": Profile(2048, 256, bucketed=False, prefill_tokens_per_s=None, decode_ms=10.0),
}


def _mix(value: Words) -> Words:
    value = ((value ^ (value >> 30)) * _FACTOR_1) & _MASK
    value = ((value ^ (value >> 27)) * _FACTOR_2) & _MASK
    return value ^ (value >> 31)


def _unmix(value: Words) -> Words:
    value = value ^ (value >> 31) ^ (value >> 62)
    value = (value * _INVERSE_2) & _MASK
    value = value ^ (value >> 27) ^ (value >> 54)
    value = (value * _INVERSE_1) & _MASK
    return value ^ (value >> 30) ^ (value >> 60)


class _Memory:
    """A slot or lane in the engine's own form, and `words`: the same KV in the natural form, for the model.

    `words` is uint64, `[layer and K or V, token and head]`. Where the two forms are the same it is the memory
    itself, and there is nothing to fetch or store.
    """

    def __init__(self, stored: np.ndarray, form: KvForm) -> None:
        self.stored = stored
        self._natural = form.rope_form == "half" and not form.head_order
        self._bytes = stored if self._natural else np.zeros_like(stored)
        self.words = self._bytes.view("<u8").reshape(2 * LAYERS, -1)
        self._heads = list(form.head_order or range(KV_HEADS))
        self._key_bytes = list(range(HEAD_DIM))
        if form.rope_form == "interleaved":
            self._key_bytes = [byte % 2 * 4 + byte // 2 for byte in range(HEAD_DIM)]

    def fetch(self, end: int) -> None:
        """Bring positions `[0, end)` into `words`."""
        if not self._natural:
            natural, stored = self._bytes[:, :, :end], self.stored[:, :, :end]
            natural[:, :, :, self._heads] = stored
            natural[:, 0] = natural[:, 0][..., np.argsort(self._key_bytes)]

    def store(self, start: int, end: int) -> None:
        """Write positions `[start, end)` of `words` into the memory."""
        if not self._natural:
            natural, stored = self._bytes[:, :, start:end], self.stored[:, :, start:end]
            stored[...] = natural[:, :, :, self._heads]
            stored[:, 0] = stored[:, 0][..., self._key_bytes]


class _Model:
    """The definition above for one seed. `words` is a slot or lane as `_Memory` has it."""

    def __init__(self, seed: int, max_tokens: int) -> None:
        self._base = _mix((seed + _STEP) & _MASK)
        rows, positions, heads = np.ogrid[: 2 * LAYERS, :max_tokens, :KV_HEADS]
        counters = (((rows * KV_HEADS + heads) << 32) + positions + 1).astype(np.uint64)
        keys = _mix((counters * _STEP) ^ self._base)
        self._keys = keys.reshape(2 * LAYERS, max_tokens * KV_HEADS)
        token_ids = np.arange(VOCAB_SIZE)
        self._noise_factors = _mix((token_ids + 1).astype(np.uint64) * _STEP) | 1
        bias = np.array([_LIKELY_BIAS.get(token_id, _UNLIKELY_BIAS) for token_id in range(VOCAB_SIZE)])
        self._floor = token_ids + (bias * _LOGIT_ONE).astype(np.int64)

    def logits(self, words: np.ndarray, length: int) -> np.ndarray:
        """Logits (float32, `[vocab_size]`) of the token behind positions `[0, length)`."""
        noise = (self._noise_factors * self._lane_hash(words, length)) >> 50
        return ((noise.astype(np.int64) << 9) + self._floor).astype(np.float32) / np.float32(_LOGIT_ONE)

    def step(self, memory: _Memory, length: int, token_id: int) -> np.ndarray:
        """Write the KV of one token at position `length`, from the KV before it alone; logits behind it."""
        memory.fetch(length)
        words, digest = memory.words, self._base
        if length:
            last = (length - 1) * KV_HEADS
            digest = _unmix(int(words[0, last])) ^ int(self._keys[0, last])
        self._write(words, length, self._digests(digest, [token_id]))
        memory.store(length, length + 1)
        return self.logits(words, length + 1)

    def prefill_chunk(
        self, memory: _Memory, token_ids: np.ndarray, start: int, end: int
    ) -> np.ndarray | None:
        """Write the KV of positions `[start, end)` of a prompt behind the prefix that is there.

        Logits behind the last position if that is the prompt's end.
        """
        memory.fetch(start)
        digest = self._continue_from(memory.words, token_ids, start) if start else self._base
        self._write(memory.words, start, self._digests(digest, token_ids[start:end].tolist()))
        memory.store(start, end)
        return self.logits(memory.words, end) if end == len(token_ids) else None

    def _continue_from(self, words: np.ndarray, token_ids: np.ndarray, start: int) -> int:
        """Digest behind the prefix `[0, start)` in memory, disturbed if that is not the prompt's.

        Recomputing from memory finds the first wrong position as a walk along the prompt would, but takes all
        positions at once: the walk costs a millisecond for a thousand tokens, at every chunk.
        """
        found = _unmix(words[0, : start * KV_HEADS : KV_HEADS]) ^ self._keys[0, : start * KV_HEADS : KV_HEADS]
        before = np.concatenate([np.array([self._base], dtype=np.uint64), found[:-1]])
        digests = _mix(before + (token_ids[:start] + 1).astype(np.uint64) * _STEP)
        wrongness = self._lane_hash(words, start) ^ self._lane_hash(self._entries(0, digests), start)
        return int(digests[-1]) ^ wrongness

    def _digests(self, digest: int, token_ids: list[int]) -> np.ndarray:
        """Running digests behind `digest`, one for each token."""
        digests = []
        for token_id in token_ids:
            digest = _mix((digest + (token_id + 1) * _STEP) & _MASK)
            digests.append(digest)
        return np.array(digests, dtype=np.uint64)

    def _entries(self, start: int, digests: np.ndarray) -> np.ndarray:
        """KV of the positions from `start`, one for each digest, as `words` has it."""
        keys = self._keys[:, start * KV_HEADS : (start + len(digests)) * KV_HEADS]
        return _mix(keys ^ digests.repeat(KV_HEADS))

    def _write(self, words: np.ndarray, start: int, digests: np.ndarray) -> None:
        words[:, start * KV_HEADS : (start + len(digests)) * KV_HEADS] = self._entries(start, digests)

    def _lane_hash(self, words: np.ndarray, length: int) -> int:
        state = xxhash.xxh3_64(seed=self._base)
        for row in words:
            state.update(row[: length * KV_HEADS])
        return state.intdigest()


class _Pace:
    """Stretches work to its declared time."""

    def __init__(self) -> None:
        self._lateness_ms = 0.0

    def stretch(self, started_us: int, declared_ms: float) -> None:
        """Sleep until `declared_ms` after `started_us`, less what the last sleep overran."""
        target_ms = declared_ms - self._lateness_ms
        remaining_ms = target_ms - (clock.now_us() - started_us) / 1_000
        self._lateness_ms = 0.0
        if remaining_ms > 0:
            clock.pause_ms(remaining_ms)
            overrun_ms = (clock.now_us() - started_us) / 1_000 - target_ms
            self._lateness_ms = min(max(overrun_ms, 0.0), _LATENESS_MAX_MS)


class _Timings:
    """Declared times of one engine: its profile with the operator's overrides."""

    def __init__(self, settings: EngineSettings, profile: Profile, chunk_tokens: int) -> None:
        override = settings.emulated_prefill_tokens_per_s
        self.prefill_tokens_per_s = profile.prefill_tokens_per_s if override is None else override
        self.decode_ms = (
            profile.decode_ms if settings.emulated_decode_ms is None else settings.emulated_decode_ms
        )
        self._bucket_tokens = chunk_tokens if profile.bucketed else 1
        if self.prefill_tokens_per_s is not None and not self.prefill_tokens_per_s > 0:
            raise ConfigError("the emulated prefill speed must be above 0 tokens/s")
        if self.decode_ms is not None and not self.decode_ms >= 0:
            raise ConfigError("the emulated decode time must be 0 ms or more")

    def chunk_ms(self, token_count: int) -> float:
        """Time of a chunk; a bucketed device computes the whole bucket, however little of it is used."""
        buckets = -(-token_count // self._bucket_tokens)
        return 1_000 * buckets * self._bucket_tokens / self.prefill_tokens_per_s


def _capabilities(
    settings: EngineSettings,
    *,
    max_tokens: int,
    chunk_tokens: int,
    longest_ms: float,
    bucketed: bool = False,
    lanes: int = 0,
    local_prefill: bool = False,
    logits: bool = True,
) -> Capabilities:
    """Capabilities with an identity made of seed and shape, so that no real engine ever pairs with it."""
    shape = f"seed={settings.emulated_seed} {LAYERS}x{KV_HEADS}x{HEAD_DIM} vocab={VOCAB_SIZE}"
    identity = ModelIdentity(
        model_id=f"emulated-{settings.emulated_seed}",
        weights_digest=xxhash.xxh3_128_hexdigest(f"emulated weights {shape}".encode()),
        tokenizer_digest=xxhash.xxh3_128_hexdigest(f"emulated bytes vocab={VOCAB_SIZE}".encode()),
        layers=LAYERS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB_SIZE,
    )
    return Capabilities(
        identity=identity,
        dtype="uint8",
        rope_form=settings.emulated_rope_form,
        head_order=(1, 0) if settings.emulated_heads_reversed else (),
        logits=logits,
        max_tokens=max_tokens,
        chunk_tokens=chunk_tokens,
        bucketed=bucketed,
        lanes=lanes,
        local_prefill=local_prefill,
        # A second on top for the arithmetic itself and for a machine that wakes sleepers late.
        longest_chunk_ms=1_000 + ceil(longest_ms),
        chunk_us=round(1_000 * longest_ms),
    )


class EmulatedPrefillEngine:
    """Prefill side of the profiles `emulated` and `rngd`. Raises `ConfigError` for `atom`."""

    def __init__(self, settings: EngineSettings) -> None:
        profile = PROFILES[settings.backend]
        if profile.prefill_tokens_per_s is None:
            raise ConfigError(f"backend {settings.backend} cannot prefill; it only decodes")
        chunk_tokens = settings.chunk_tokens or profile.chunk_tokens
        self._timings = _Timings(settings, profile, chunk_tokens)
        self.capabilities = _capabilities(
            settings,
            max_tokens=settings.max_tokens or profile.max_tokens,
            chunk_tokens=chunk_tokens,
            longest_ms=self._timings.chunk_ms(chunk_tokens),
            bucketed=profile.bucketed,
            logits=not settings.emulated_no_logits,
        )
        self._model = _Model(settings.emulated_seed, self.capabilities.max_tokens)
        self._pace = _Pace()
        self._slots: list[_Memory] = []

    def attach(self, slots: list[memoryview]) -> None:
        """Take the slab's payloads, `layout.slot_bytes` each; they are held until the next attach."""
        layout = self.capabilities.layout
        for slot in slots:
            check(slot.nbytes == layout.slot_bytes, f"slot of {slot.nbytes} bytes, not {layout.slot_bytes}")
        arrays = [np.frombuffer(slot, dtype=np.uint8).reshape(layout.shape) for slot in slots]
        self._slots = [_Memory(array, self.capabilities.form) for array in arrays]

    def prefill_chunk(
        self, slot_index: int, token_ids: np.ndarray, start: int, end: int
    ) -> np.ndarray | None:
        """Compute KV of positions `[start, end)` into the slot, in the declared time of such a chunk."""
        started_us = clock.now_us()
        check(0 <= start < end <= self.capabilities.max_tokens, f"chunk [{start}, {end}) outside the slot")
        logits = self._model.prefill_chunk(self._slots[slot_index], token_ids, start, end)
        self._pace.stretch(started_us, self._timings.chunk_ms(end - start))
        return logits if self.capabilities.logits else None


class EmulatedDecodeEngine:
    """Decode side of the profiles `emulated` and `atom`. Raises `ConfigError` for `rngd`."""

    def __init__(self, settings: EngineSettings) -> None:
        profile = PROFILES[settings.backend]
        if profile.decode_ms is None:
            raise ConfigError(f"backend {settings.backend} cannot decode; it only prefills")
        local_prefill = profile.prefill_tokens_per_s is not None
        chunk_tokens = settings.chunk_tokens or profile.chunk_tokens
        self._timings = _Timings(settings, profile, chunk_tokens)
        chunk_ms = self._timings.chunk_ms(chunk_tokens) if local_prefill else 0.0
        self.capabilities = _capabilities(
            settings,
            max_tokens=settings.max_tokens or profile.max_tokens,
            chunk_tokens=chunk_tokens,
            longest_ms=max(chunk_ms, self._timings.decode_ms),
            lanes=settings.lanes,
            local_prefill=local_prefill,
        )
        self._model = _Model(settings.emulated_seed, self.capabilities.max_tokens)
        self._pace = _Pace()
        form, shape = self.capabilities.form, self.capabilities.layout.shape
        self._lanes = [_Memory(np.zeros(shape, dtype=np.uint8), form) for _ in range(settings.lanes)]
        self._lengths = [0] * settings.lanes

    def write_kv(self, lane: int, layer: int, start: int, piece: np.ndarray) -> None:
        """Copy a piece `[layer_count, 2, token_count, kv_heads, head_dim]` (uint8) into the lane."""
        layer_count, _, token_count, _, _ = piece.shape
        check(layer + layer_count <= LAYERS, f"layers [{layer}, {layer + layer_count}) outside the model")
        self._check_positions(start, start + token_count)
        self._lanes[lane].stored[layer : layer + layer_count, :, start : start + token_count] = piece

    def read_kv(self, lane: int, first_layer: int, last_layer: int, start: int, end: int) -> np.ndarray:
        """Positions `[start, end)` of the lane as a piece of its own."""
        check(0 <= start <= end <= self._lengths[lane], f"KV of [{start}, {end}) in a lane that is shorter")
        return self._lanes[lane].stored[first_layer:last_layer, :, start:end].copy()

    def set_length(self, lane: int, token_count: int) -> None:
        """Declare that the lane holds positions `[0, token_count)`; whatever lies behind them is not read."""
        self._check_positions(0, token_count)
        self._lengths[lane] = token_count

    def step(self, lanes: list[int], token_ids: list[int]) -> np.ndarray:
        """Feed one token to each lane in the declared time of one step, however many lanes take part."""
        started_us = clock.now_us()
        logits = np.empty((len(lanes), VOCAB_SIZE), dtype=np.float32)
        for row, (lane, token_id) in enumerate(zip(lanes, token_ids, strict=True)):
            length = self._lengths[lane]
            self._check_positions(length, length + 1)
            logits[row] = self._model.step(self._lanes[lane], length, token_id)
            self._lengths[lane] = length + 1
        self._pace.stretch(started_us, self._timings.decode_ms)
        return logits

    def prefill_chunk(self, lane: int, token_ids: np.ndarray, start: int, end: int) -> np.ndarray | None:
        """Local prefill of positions `[start, end)`; `atom` has none, and calling it there is our bug."""
        started_us = clock.now_us()
        check(self.capabilities.local_prefill, "this decode engine has no local prefill")
        check(start < end, f"empty chunk [{start}, {end})")
        self._check_positions(start, end)
        logits = self._model.prefill_chunk(self._lanes[lane], token_ids, start, end)
        self._lengths[lane] = end
        self._pace.stretch(started_us, self._timings.chunk_ms(end - start))
        return logits

    def _check_positions(self, start: int, end: int) -> None:
        check(
            0 <= start <= end <= self.capabilities.max_tokens,
            f"positions [{start}, {end}) outside a lane of {self.capabilities.max_tokens}",
        )
