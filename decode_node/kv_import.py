"""The import: KV out of a slot, into a lane, verified.

Decides whether the bytes that now lie in the lane are those that the record speaks of. Driven piece by piece
by the compute thread, so that decode steps of other lanes fit between. A piece is copied out of shared memory
into private memory, digested there, and written to the lane from there: what was verified cannot change
afterwards. Every chunk's digest is compared, and after the last byte the slot's epoch: the digest finds
corruption, the epoch tells that the slot was given to somebody else meanwhile.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from common.block_store import BlockCorrupt, BlockStore
from common.clock import now_us
from common.digests import bytes_digest
from common.engines.interface import DecodeEngine
from common.errors import ErrorCode
from common.kv_convert import KvConverter
from common.kv_layout import KvLayout, chunk_bounds
from common.messages import PrefillDone
from decode_node.commands import StartImport
from transport.landing import Landing
from transport.slab import SlabView

PIECE_BYTES = 512 * 1024


def copy_blocks(
    store: BlockStore, places: tuple[int, ...], tokens: int, engine: DecodeEngine, lane: int
) -> Iterator[None]:
    """Copy the first `tokens` of a prompt from the prefix cache into a lane, one block per `next`.

    Raises `BlockCorrupt` for a place that does not hold what was put there.
    """
    start = 0
    for place in places:
        block = store.read(place).view(engine.capabilities.layout.numpy_dtype)
        count = min(block.shape[2], tokens - start)
        if count <= 0:
            return
        engine.write_kv(lane, 0, start, block[:, :, :count])
        start += count
        yield


@dataclass(frozen=True, slots=True)
class KvSource:
    """Where the KV of one session is read, how it lies there, and what makes it the engine's own."""

    view: SlabView | Landing
    layout: KvLayout
    converter: KvConverter


@dataclass(frozen=True, slots=True)
class ImportFrom:
    """`StartImport` with the mapping to read from."""

    start: StartImport
    source: KvSource


class KvImport:
    """One copy from (slot, epoch) into a lane. `code` is None while nothing is wrong.

    corrupt_place: the place of the prefix cache that was damaged.
    """

    def __init__(
        self,
        source: KvSource,
        record: PrefillDone,
        engine: DecodeEngine,
        lane: int,
        send_from: int = 0,
    ) -> None:
        self._view = source.view
        self._layout = source.layout
        self._converter = source.converter
        self._record = record
        self._send_from = send_from
        self._engine = engine
        self._lane = lane
        self.code: ErrorCode | None = None
        self.detail = ""
        self.corrupt_place: int | None = None
        self.copy_us = 0
        self.digest_us = 0
        self.convert_us = 0

    def prefix(self, store: BlockStore, places: tuple[int, ...]) -> Iterator[None]:
        """Copy what need not come from the slot, one block per `next`; before `pieces`."""
        started_us = now_us()
        try:
            for _ in copy_blocks(store, places, self._send_from, self._engine, self._lane):
                self.copy_us += now_us() - started_us
                yield
                started_us = now_us()
        except BlockCorrupt as error:
            self.corrupt_place = error.place
            self._refuse(ErrorCode.KV_CORRUPT, str(error))

    def pieces(self) -> Iterator[None]:
        """Copy one piece per `next`; ends when the copy has ended, well or not."""
        record, layout = self._record, self._layout
        dtype = np.dtype(layout.numpy_dtype)
        slot = np.frombuffer(self._view.slot(record.slot), dtype=dtype).reshape(layout.shape)
        bounds = chunk_bounds(self._send_from, record.token_count, record.chunk_tokens)
        for (start, end), digest in zip(bounds, record.chunk_digests, strict=True):
            hasher = xxhash.xxh3_128()
            for first, last in self._layer_groups(end - start):
                self._copy(slot[first:last, :, start:end], first, start, hasher)
                yield
            if hasher.digest() != digest:
                # A slot that changed hands does not fit its digest either, and no memory is at fault.
                if not self._refuse_stale():
                    wrong = f"tokens {start} to {end} do not match their digest"
                    self._refuse(ErrorCode.KV_CORRUPT, wrong)
                return
        if not self._refuse_stale():
            self._engine.set_length(self._lane, record.token_count)

    def logits(self) -> np.ndarray | None:
        """The record's logits, verified: float32, `[vocab_size]`; None without any, or if refused."""
        record = self._record
        if not record.logits:
            return None
        if bytes_digest(record.logits) != record.logits_digest:
            self._refuse(ErrorCode.KV_CORRUPT, "the logits do not match their digest")
            return None
        return np.frombuffer(record.logits, dtype="<f4")

    def _layer_groups(self, token_count: int) -> Iterator[tuple[int, int]]:
        """Whole layers, as many as fit a piece."""
        layer_bytes = 2 * token_count * self._layout.row_bytes
        step = max(1, PIECE_BYTES // layer_bytes)
        for first in range(0, self._layout.layers, step):
            yield first, min(first + step, self._layout.layers)

    def _copy(self, source: np.ndarray, layer: int, start: int, hasher: xxhash.xxh3_128) -> None:
        started_us = now_us()
        piece = source.copy()
        copied_us = now_us()
        hasher.update(piece)
        digested_us = now_us()
        piece = self._converter.convert(piece)
        converted_us = now_us()
        self._engine.write_kv(self._lane, layer, start, piece)
        self.copy_us += copied_us - started_us + now_us() - converted_us
        self.digest_us += digested_us - copied_us
        self.convert_us += converted_us - digested_us

    def _refuse_stale(self) -> bool:
        """Refuse the copy if the slot belongs to somebody else by now; whether it does."""
        epoch = self._view.epoch(self._record.slot)
        if epoch == self._record.epoch:
            return False
        detail = f"slot {self._record.slot} is at epoch {epoch}, not {self._record.epoch}"
        self._refuse(ErrorCode.KV_STALE, detail)
        return True

    def _refuse(self, code: ErrorCode, detail: str) -> None:
        self.code, self.detail = code, detail
        self._engine.set_length(self._lane, 0)
