"""Where KV lands that comes over a socket: one buffer for each granted slot of a session.

Decides the memory and its fence; owned by the decode node's wiring, filled on the loop thread, read by the
compute thread once everything is there. To the import it looks like a slab that is mapped (`SlabView`): the
epoch is the production that the buffer was last given to. It must never be filled for a production that the
bulk rules did not name.
"""

import mmap

import numpy as np

from common.kv_layout import KvLayout
from common.messages import KvPiece


class Landing:
    """Landing buffers, made when a slot is first used: `layout.slot_bytes` each, touched as KV arrives."""

    def __init__(self, layout: KvLayout) -> None:
        self._layout = layout
        self._buffers: dict[int, memoryview] = {}
        self._rows: dict[int, np.ndarray] = {}
        self._epochs: dict[int, int] = {}

    def begin(self, index: int, epoch: int) -> None:
        """Give the buffer to a new production, before its PREFILL goes out."""
        if index not in self._buffers:
            layout = self._layout
            self._buffers[index] = memoryview(mmap.mmap(-1, layout.slot_bytes))
            rows = np.frombuffer(self._buffers[index], dtype=np.uint8)
            self._rows[index] = rows.reshape(2 * layout.layers, layout.max_tokens * layout.row_bytes)
        self._epochs[index] = epoch

    def slot(self, index: int) -> memoryview:
        """The payload of one slot, as `SlabView.slot`."""
        return self._buffers[index]

    def epoch(self, index: int) -> int:
        """The production that the buffer belongs to."""
        return self._epochs[index]

    def land(self, piece: KvPiece, parts: list[memoryview]) -> None:
        """Copy the frames of a piece to their place; one frame for each layer's K and V."""
        row_bytes = self._layout.row_bytes
        rows = self._rows[piece.slot][2 * piece.layer : 2 * (piece.layer + piece.layer_count)]
        for row, part in zip(rows, parts, strict=True):
            row[piece.start * row_bytes : piece.end * row_bytes] = np.frombuffer(part, dtype=np.uint8)


def parts_of(slot: memoryview, piece: KvPiece, layout: KvLayout) -> list[memoryview]:
    """The frames of a piece: views of a slot in wire layout, without a copy."""
    row_bytes, run_bytes = layout.row_bytes, layout.max_tokens * layout.row_bytes
    runs = range(2 * piece.layer, 2 * (piece.layer + piece.layer_count))
    start, end = piece.start * row_bytes, piece.end * row_bytes
    return [slot[run * run_bytes + start : run * run_bytes + end] for run in runs]


def part_bytes(piece: KvPiece, layout: KvLayout) -> int:
    """Bytes of each frame of a piece."""
    return (piece.end - piece.start) * layout.row_bytes
