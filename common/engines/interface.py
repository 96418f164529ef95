"""What a backend must offer, on either side.

Decides nothing; names the contract between the compute threads and the engines. An engine runs on its
node's compute thread alone, owns no socket, and never sees a session, a slot's epoch or a job: it is told
positions, bytes and token ids. New backends implement these classes and enter `common/engines/registry.py`.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from common.kv_convert import KvForm
from common.kv_layout import KvLayout


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What must be equal on both nodes before KV may pass between them.

    `weights_digest` is over the source weights file, before any conversion; `tokenizer_digest` over whatever
    decides the mapping between text and ids.
    """

    model_id: str
    weights_digest: str
    tokenizer_digest: str
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine declares once it is loaded.

    max_tokens: most positions a slot or lane can hold. chunk_tokens: prefill cuts at multiples of it.
    bucketed: a chunk is padded to chunk_tokens, so a short one costs as much as a full one. lanes: how many
    requests decode at once, 0 for a prefill-only engine. local_prefill: whether the decode engine can compute
    a prompt itself. longest_chunk_ms: an upper bound of one chunk's or step's compute time, from which the
    node derives its stall bound. logits: whether prefill answers the logits of a prompt's last position; if
    not, the prompt is handed over one token short, and the decode engine computes that token. rope_form,
    head_order, rotary_dim: how KV is written, as `KvForm` has them. chunk_us: what a full chunk takes, as
    measured at load; 0 for not measured.
    """

    identity: ModelIdentity
    dtype: str
    rope_form: str
    max_tokens: int
    chunk_tokens: int
    bucketed: bool = False
    lanes: int = 0
    local_prefill: bool = False
    longest_chunk_ms: int = 10_000
    logits: bool = True
    head_order: tuple[int, ...] = ()
    rotary_dim: int = 0
    chunk_us: int = 0

    @property
    def form(self) -> KvForm:
        """How this engine writes KV."""
        return KvForm(self.dtype, self.rope_form, self.head_order, self.rotary_dim)

    @property
    def layout(self) -> KvLayout:
        """Geometry of a slot or lane in wire layout."""
        identity = self.identity
        return KvLayout(identity.layers, identity.kv_heads, identity.head_dim, self.dtype, self.max_tokens)


class Tokenizer(Protocol):
    """Text to ids and back; used by the decode node's text thread alone."""

    vocab_size: int
    eos_token_ids: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Ids of raw text, without any special token added that the model's raw form does not have."""

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation through the model's chat template, ready for the assistant's answer.

        Raises ValueError when the model has no template or the messages do not fit it.
        """

    def decode(self, token_ids: list[int]) -> str:
        """Text of ids, special tokens left out; incomplete UTF-8 at the end becomes U+FFFD."""


class PrefillEngine(Protocol):
    """Computes KV of prompts straight into slots."""

    capabilities: Capabilities

    def attach(self, slots: list[memoryview]) -> None:
        """Take the slab's payloads: writable, one per slot, each `layout.slot_bytes` long, in wire layout."""

    def prefill_chunk(
        self, slot_index: int, token_ids: np.ndarray, start: int, end: int
    ) -> np.ndarray | None:
        """Compute KV of positions `[start, end)` of the prompt `token_ids` (int64) into the slot.

        Positions before `start` are already in the slot. Returns the logits of the last position (float32,
        `[vocab_size]`) when `end` is the prompt's end and the engine has logits, else None. A new prompt
        starts at `start == 0` and may find any bytes in the slot.
        """


class DecodeEngine(Protocol):
    """Generates tokens from lanes. Position of the next token = number of KV positions in the lane."""

    capabilities: Capabilities

    def write_kv(self, lane: int, layer: int, start: int, piece: np.ndarray) -> None:
        """Copy verified KV into a lane.

        `piece` is `[layer_count, 2, token_count, kv_heads, head_dim]` in wire layout (dtype as the layout
        names it; bfloat16 arrives as uint16 bits), for layers from `layer` and positions from `start`. The
        bytes may be reused by the caller afterwards.
        """

    def read_kv(self, lane: int, first_layer: int, last_layer: int, start: int, end: int) -> np.ndarray:
        """KV of positions `[start, end)`, all in the lane's length, in layers `[first_layer, last_layer)`.

        A wire piece as `write_kv` takes it, in the engine's own form, contiguous and in memory of its own.
        """

    def set_length(self, lane: int, token_count: int) -> None:
        """Declare that the lane holds KV of positions `[0, token_count)`; 0 empties it."""

    def step(self, lanes: list[int], token_ids: list[int]) -> np.ndarray:
        """Feed one token to each lane, append its KV; logits of the next (float32, `[lane, vocab_size]`)."""

    def prefill_chunk(self, lane: int, token_ids: np.ndarray, start: int, end: int) -> np.ndarray | None:
        """Local prefill: as `PrefillEngine.prefill_chunk`, into a lane; the length becomes `end`."""
