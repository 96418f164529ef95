"""Copies of lanes' KV on their way to the prefix cache, between decode steps.

Decides when a block is copied: soon, because the next job may begin with the same, but no step waits for all
of it; and at once where the lane is about to change or the block about to be read. Part of the compute
thread, called by it alone. It must never let a place read as what lay there before: the core promises the
blocks to the next job before they are copied.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from common.block_store import BlockStore
from common.clock import now_us
from common.engines.interface import DecodeEngine
from common.prefix_commands import BlocksStored, Store, StoreBlocks
from transport.loop import Mailbox

SLICE_US = 4_000  # for copies between two decode steps


@dataclass(slots=True)
class _Order:
    """Blocks of a lane that are still to be copied."""

    lane: int
    left: deque[Store]


class LaneStoring:
    """All orders to copy. explain: makes one line of an error, and logs it."""

    def __init__(self, mailbox: Mailbox, explain: Callable[[Exception, str], str]) -> None:
        self._mailbox = mailbox
        self._explain = explain
        self._orders: deque[_Order] = deque()
        self._store: BlockStore | None = None
        self._engine: DecodeEngine | None = None

    def use(self, store: BlockStore) -> None:
        """Give the prefix cache its memory, before the first order."""
        self._store = store

    def read_from(self, engine: DecodeEngine) -> None:
        """Say whose lanes they are, before the first order."""
        self._engine = engine

    @property
    def busy(self) -> bool:
        return bool(self._orders)

    def begin(self, command: StoreBlocks) -> None:
        """Take an order; each block is answered by BlocksStored."""
        for block in command.stores:
            self._store.empty(block.place)
        self._orders.append(_Order(command.holder, deque(command.stores)))

    def work(self) -> None:
        """Copy for a slice of time."""
        until_us = now_us() + SLICE_US
        while self._orders and now_us() < until_us:
            self._copy_one(self._orders[0])

    def finish(self, lane: int, places: tuple[int, ...] = ()) -> None:
        """The lane's KV is about to change, the places are about to be read: copy all of that now."""
        wanted = set(places)
        for order in list(self._orders):
            if order.lane == lane or any(block.place in wanted for block in order.left):
                while order.left:
                    self._copy_one(order)

    def _copy_one(self, order: _Order) -> None:
        block = order.left.popleft()
        tokens, layers = self._store.block_shape[2], self._store.block_shape[0]
        start = block.start_tokens
        if not order.left:
            self._orders.remove(order)
        try:
            self._store.write(block.place, self._engine.read_kv(order.lane, 0, layers, start, start + tokens))
        except Exception as error:
            self._explain(error, f"lane {order.lane}")
            self._mailbox.put(BlocksStored((), (block.entry_id,)))
        else:
            self._mailbox.put(BlocksStored((block.entry_id,), ()))
