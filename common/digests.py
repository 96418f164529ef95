"""The two digests that travel.

Decides how a prompt is named and how bytes are checked; called by the text thread, both compute threads and
the import. The digests find accidents (bad memory, a wrong slot, a foreign prompt), not attacks: they are
unkeyed, so nothing may trust them against a hostile peer.
"""

from collections.abc import Sequence

import numpy as np
import xxhash

TOKEN_ID_LIMIT = 2**31


def prompt_digest(token_ids: Sequence[int] | np.ndarray) -> str:
    """XXH3-128 of the ids as little-endian int32, as 32 hex digits.

    The same ids give the same digest as a list, a tuple or an array of any integer type. Raises ValueError
    for an id that int32 cannot hold, which would otherwise wrap round and collide with another prompt.
    """
    wide = np.asarray(token_ids, dtype=np.int64)
    if wide.size and (wide.min() < 0 or wide.max() >= TOKEN_ID_LIMIT):
        raise ValueError(f"token ids must be in [0, {TOKEN_ID_LIMIT})")
    return xxhash.xxh3_128_hexdigest(wide.astype("<i4").tobytes())


def bytes_digest(buffer: bytes | bytearray | memoryview | np.ndarray) -> bytes:
    """XXH3-128 (16 bytes) of a C-contiguous buffer: a KV chunk, or logits.

    Raises BufferError or ValueError for a buffer that is not contiguous.
    """
    return xxhash.xxh3_128_digest(buffer)
