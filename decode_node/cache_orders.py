"""Saving and loading the prefix cache for a client: one at a time, while jobs go on.

Decides which orders are taken, which blocks are saved, and which places a loaded file gets. Part of the
decode core, called by it alone; the file is `decode_node.cache_files`'s, on the compute thread. Blocks are
locked while they are saved, so that a full cache takes nothing new until then. It must never let a block
match before the whole file was verified and the block is in its place, nor follow a client's name out of the
directory that the operator gave.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Final

from common import limits
from common.errors import ErrorCode, check
from common.messages import CacheOrder, CacheReply
from common.prefix_commands import (
    CacheFileEnded,
    CacheHeadsRead,
    KnownBlock,
    ReadCacheFile,
    RestoreBlocks,
    WriteCacheFile,
)
from decode_node.clients import Clients
from decode_node.events import SendToClient
from decode_node.prefix_cache import PrefixCache

_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


@dataclass(slots=True)
class _Going:
    """The order that is carried out. locks: of the blocks being saved. restored: entries being loaded."""

    session: str
    order: CacheOrder
    blocks: tuple[KnownBlock, ...] = ()
    locks: list[int] = field(default_factory=list)
    restored: list[int] = field(default_factory=list)


class CacheOrders:
    """What clients want saved and loaded. has_directory: whether the operator gave one."""

    def __init__(self, cache: PrefixCache, clients: Clients, has_directory: bool) -> None:
        self._cache = cache
        self._clients = clients
        self._has_directory = has_directory
        self._going: _Going | None = None

    @property
    def lock_count(self) -> int:
        """Locks of the prefix cache that belong to an order."""
        return 0 if self._going is None else len(self._going.locks)

    @property
    def idle(self) -> bool:
        """Whether compute has no file open."""
        return self._going is None

    def on_order(self, session: str, order: CacheOrder, draining: bool) -> list[Any]:
        """Begin, or say why not."""
        refusal = self._refusal(order, draining)
        if refusal is not None:
            return self._answer(session, CacheReply(0, 0, "", *refusal))
        self._going = _Going(session, order)
        return [self._save()] if order.action == "save" else [ReadCacheFile(order.name)]

    def on_heads_read(self, event: CacheHeadsRead, now_ms: int) -> list[Any]:
        """The file to load is whole: place what there is room for."""
        planned = self._cache.index.plan_restore(event.heads)
        stores = tuple((position, store) for position, store in enumerate(planned) if store is not None)
        self._going.restored = [store.entry_id for _, store in stores]
        return [RestoreBlocks(stores)]

    def on_ended(self, event: CacheFileEnded, now_ms: int) -> list[Any]:
        """Compute is through with the file."""
        check(self._going is not None, "a file ended that nobody had asked for")
        going, index = self._going, self._cache.index
        for lock in reversed(going.locks):
            index.unlock(lock)
        going.locks = []
        if event.corrupt_place is not None:
            places = {block.place: block.entry_id for block in going.blocks}
            index.forget(places[event.corrupt_place])
            return [self._save()]
        self._going = None
        settle = index.abandon if event.problem is not None else index.stored
        for entry_id in reversed(going.restored):
            settle(entry_id)
        count = len(going.blocks) + len(going.restored)
        return self._answer(going.session, _reply(event, count))

    def _refusal(self, order: CacheOrder, draining: bool) -> tuple[ErrorCode, str] | None:
        """Why an order cannot be carried out, if it cannot."""
        if order.action not in ("save", "load"):
            return ErrorCode.INVALID_REQUEST, "a cache is saved or loaded, nothing else"
        if not _NAME.fullmatch(order.name):
            return ErrorCode.INVALID_REQUEST, (
                "a cache file has a plain name, without a path: at most 64 of A-Z a-z 0-9 . _ -, no dot first"
            )
        if not self._cache.on:
            return ErrorCode.INVALID_REQUEST, "this decode node has no prefix cache (--prefix-cache-mb 0)"
        if not self._has_directory:
            return ErrorCode.INVALID_REQUEST, (
                "this decode node keeps no cache files: start it with --prefix-cache-dir DIR"
            )
        if draining:
            return ErrorCode.SHUTTING_DOWN, "this decode node is shutting down"
        if self._going is not None:
            return ErrorCode.BUSY, f"{self._going.order.name} is being written or read: wait for its end"
        return None

    def _save(self) -> WriteCacheFile:
        """Lock all that may match, and have it written."""
        going, lock_entry = self._going, self._cache.index.lock_entry
        going.blocks = tuple(self._cache.index.known_blocks())
        going.locks = [lock_entry(block.entry_id) for block in going.blocks]
        return WriteCacheFile(going.order.name, going.blocks)

    def _answer(self, session: str, reply: CacheReply) -> list[Any]:
        return [SendToClient(session, reply)] if session in self._clients.sessions else []


def _reply(event: CacheFileEnded, blocks: int) -> CacheReply:
    path = event.path[: limits.DETAIL_CHARACTERS]
    if event.problem is None:
        return CacheReply(blocks, event.size_bytes, path)
    return CacheReply(0, 0, path, ErrorCode.INVALID_REQUEST, event.problem[: limits.DETAIL_CHARACTERS])
