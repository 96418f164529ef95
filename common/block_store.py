"""The bytes of a prefix cache: one array of equal places, each with the digest of what was put there.

Decides how much memory the cache takes and whether bytes may be believed; used by the compute thread of
either node alone, which is told by the core (see `common.prefix_index`) which place to write or read. It must
never hand out bytes that do not match the digest kept when they were written: a token made from them would be
wrong, and nobody would know.

The memory is asked for once, at most the budget, and the host lends its pages as they are first written: none
is touched at the start, and none is given back. Beside it each written place costs about 150 bytes.
"""

import numpy as np

from common.digests import bytes_digest
from common.errors import ConfigError, TandemError, check
from common.kv_layout import KvLayout


class BlockCorrupt(TandemError):
    """A place does not hold what was written there; its entry is to be forgotten, its KV computed again."""

    def __init__(self, place: int) -> None:
        super().__init__(f"the KV kept in place {place} of the prefix cache does not match its digest")
        self.place = place


class BlockStore:
    """KV of blocks, in wire layout.

    block_shape: of one place as bytes (uint8), `[layer, 2, token, kv_head, bytes of one head's row]`.
    """

    def __init__(self, layout: KvLayout, block_tokens: int, budget_bytes: int) -> None:
        """A budget of 0 is off. Raises `ConfigError` for one that holds no block or that the host has not."""
        self.block_bytes = block_tokens * layout.token_bytes
        self.places = budget_bytes // self.block_bytes
        if budget_bytes and not self.places:
            raise ConfigError(
                f"a prefix cache of {budget_bytes} bytes holds no block: one of {block_tokens} tokens takes"
                f" {self.block_bytes} bytes; give it at least that, smaller blocks, or 0 for no cache"
            )
        width_bytes = layout.row_bytes // layout.kv_heads
        self.block_shape = (layout.layers, 2, block_tokens, layout.kv_heads, width_bytes)
        try:
            self._memory = np.empty((self.places, *self.block_shape), dtype=np.uint8)
        except MemoryError as error:
            raise ConfigError(
                f"this host has no {budget_bytes / 2**20:.0f} MiB of memory for a prefix cache: give it less"
            ) from error
        self._digests: dict[int, bytes] = {}

    def write(self, place: int, piece: np.ndarray) -> None:
        """Copy a block's KV to a place, and keep the digest of the copy.

        piece: `[layer, 2, token, kv_head, ...]`, of any item type, whose last axis is contiguous and as many
        bytes long as the layout says. Until a write has ended well, the place does not read.
        """
        self.empty(place)
        rows = piece.view(np.uint8)
        check(rows.shape == self.block_shape, f"a block of shape {rows.shape}, not {self.block_shape}")
        kept = self._memory[place]
        np.copyto(kept, rows)
        self._digests[place] = bytes_digest(kept)

    def empty(self, place: int) -> None:
        """The place holds nothing any more, until it is written."""
        self._digests.pop(place, None)

    def read(self, place: int) -> np.ndarray:
        """The bytes of a place, verified now; read-only, and valid until the place is written again.

        Raises `BlockCorrupt`, for a place that holds nothing too.
        """
        kept = self._memory[place]
        kept.flags.writeable = False
        if place not in self._digests or bytes_digest(kept) != self._digests[place]:
            raise BlockCorrupt(place)
        return kept

    def digest(self, place: int) -> bytes:
        """The digest (XXH3-128, 16 bytes) of what was written to a place."""
        check(place in self._digests, f"place {place} was never written")
        return self._digests[place]
