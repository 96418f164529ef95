"""The digests of prompts, of bytes, and of blocks of a prompt.

Decides how a prompt is named, how bytes are checked, and by which keys blocks are looked up; called by the
text thread, both compute threads, the import and the prefix cache. These digests find accidents (bad memory,
a wrong slot, a foreign prompt), not attacks: they are unkeyed, so nothing may trust them against a hostile
peer. Only a root must not tell the salt that went into it, and so is of another kind.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

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


def prefix_root(*identity: str | int, salt: str = "") -> bytes:
    """16 bytes that stand before the first block of every prompt: BLAKE2b of whatever KV depends on.

    Different parts, or different salts, give different roots, and so share no block. A file may keep a root
    and not the salt: the digest is one-way, which the fast ones are not. A salt must be hard to guess for
    that to mean anything.
    """
    parts = json.dumps([*identity, salt]).encode()
    return hashlib.blake2b(parts, digest_size=16, person=b"tandem prefix").digest()


@dataclass(frozen=True, slots=True)
class PrefixIdentity:
    """What KV depends on besides the tokens. wire_form: whatever else decides the meaning of the bytes."""

    model_id: str
    weights_digest: str
    dtype: str
    wire_form: str
    layers: int
    kv_heads: int
    row_bytes: int
    block_tokens: int

    @property
    def block_bytes(self) -> int:
        """Size of one block's KV over all layers, K and V."""
        return 2 * self.layers * self.block_tokens * self.row_bytes

    def root(self, salt: str = "") -> bytes:
        """The root of all chains of this identity and salt."""
        return prefix_root(*astuple(self), salt=salt)


def block_keys(
    before: bytes,
    tokens: bytes,
    block_tokens: int,
    digest: Callable[[bytes], bytes] = xxhash.xxh3_128_digest,
) -> tuple[str, ...]:
    """Keys (hex digits) of the whole blocks of `tokens` (int32 little-endian ids), each over all before it.

    before: the root, or the digest that the key of the block before stands for. The tokens after the last
    whole block have no key.
    """
    size = 4 * block_tokens
    keys = []
    for start in range(0, len(tokens) - size + 1, size):
        before = digest(before + tokens[start : start + size])
        keys.append(before.hex())
    return tuple(keys)
