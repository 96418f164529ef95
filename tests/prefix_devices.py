"""A pair of pure cores with a prefix cache in each node, and compute that knows what KV depends on.

Decides how blocks are kept and copied in tests of the cores. A kept block remembers all ids up to its end,
because real KV depends on them: whoever puts it behind other ids gets `WRONG`, and so other tokens. Used
where `tests.cores.Pair` is, whose other devices are good enough here.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from common.digests import PrefixIdentity, bytes_digest
from common.errors import ErrorCode
from common.kv_layout import chunk_bounds
from common.messages import NodeProfile, PrefillDone, PrefillFailed
from common.prefix_commands import BlocksStored, StoreBlocks
from common.prefix_index import PrefixIndex
from decode_node import commands
from decode_node import events as ev
from decode_node.prefix_cache import PrefixSettings
from decode_node.scheduler import Route
from prefill_node.core import PrefillCore
from prefill_node.events import ChunkComputed, ExitNode, PrefixCorrupt, RunChunk
from prefill_node.stack import PrefillStack
from tests.actors import ROUTE, TIMES, PrefillSide, names, prefill_settings
from tests.cores import Pair
from tests.devices import LAYOUT, PROFILE, TOKEN_BYTES, Device, Slab, SlotMemory, logits_of
from transport.listener import Listener
from transport.peers import SendFrame

BLOCK = 3
PLACES = 64
WRONG = 255
IDENTITY = PrefixIdentity("letters", "weights", "uint8", "half", 1, 1, TOKEN_BYTES, BLOCK)


@dataclass
class Blocks:
    """The bytes of one prefix cache: for each place, all ids up to the end of its block."""

    block_tokens: int
    kept: dict[int, list[int]] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)
    copied: int = 0

    def store(self, command: StoreBlocks, token_ids: list[int]) -> BlocksStored:
        for store in command.stores:
            end = store.start_tokens + self.block_tokens
            assert len(token_ids) >= end, "a block without KV is stored"
            self.kept[store.place] = token_ids[:end]
            self.damaged.discard(store.place)
        return BlocksStored(tuple(store.entry_id for store in command.stores), ())

    def first_damaged(self, places: tuple[int, ...]) -> int | None:
        return next((place for place in places if place in self.damaged), None)

    def copy(self, places: tuple[int, ...], tokens: int) -> list[int]:
        """The ids whose KV these blocks give, one behind the other."""
        row: list[int] = []
        for place in places:
            kept = self.kept[place]
            fits = kept[: len(row)] == row
            row += kept[len(row) :] if fits else [WRONG] * self.block_tokens
            self.copied += 1
        assert len(row) >= tokens, "fewer blocks than tokens are to be copied"
        return row[:tokens]


class PrefixSlab(Slab):
    """The memory of a prefill process and of its prefix cache. computed: tokens, each time they were."""

    def __init__(self, slots: list[SlotMemory], block_tokens: int) -> None:
        super().__init__(slots)
        self.blocks = Blocks(block_tokens)
        self.computed = 0

    def compute(self, command: RunChunk | StoreBlocks) -> Any:
        if isinstance(command, StoreBlocks):
            return self.blocks.store(command, self.slots[command.holder].token_ids)
        slot = self.slots[command.slot]
        if not command.digests:
            slot.epoch, slot.token_ids = command.epoch, []
            damaged = self.blocks.first_damaged(command.places)
            if damaged is not None:
                return PrefixCorrupt(command.slot, command.epoch, damaged)
            slot.token_ids = self.blocks.copy(command.places, command.cached_tokens)
        prompt = np.frombuffer(command.prompt, dtype="<i4").tolist()
        first = max(command.start, command.cached_tokens)
        assert len(slot.token_ids) >= min(first, command.end), "a chunk is computed behind a hole"
        if command.end > first:
            slot.token_ids[first:] = prompt[first : command.end]
            self.computed += command.end - first
        digest = bytes_digest(bytes(slot.token_ids[command.start : command.end]))
        if command.end < len(prompt):
            return ChunkComputed(command.slot, command.epoch, command.end, digest, 1_000, None, None)
        row = logits_of(slot.token_ids).tobytes()
        return ChunkComputed(command.slot, command.epoch, command.end, digest, 1_000, row, bytes_digest(row))


class PrefixPrefillSide(PrefillSide):
    """A prefill process with a prefix cache. done: its records."""

    def __init__(self, incarnation: str, slots: int, profile: NodeProfile, places: int) -> None:
        super().__init__(incarnation, slots, profile)
        settings = replace(
            prefill_settings(incarnation, slots, profile),
            prefix_places=places,
            prefix_block_tokens=BLOCK,
            prefix_identity=IDENTITY,
        )
        self.core = PrefillCore(settings, names(f"{incarnation}-session"))
        listener = Listener(TIMES, self.core.progress_count)
        self.stack = PrefillStack(listener, self.core, LAYOUT, give_up_ms=TIMES.lease_ms)
        self.slab = PrefixSlab([SlotMemory() for _ in range(slots)], BLOCK)
        self.done: list[PrefillDone] = []

    def step(self, event: Any, now_ms: int) -> None:
        events = deque([event])
        while events and self.exit is None:
            for effect in self.stack.step(events.popleft(), now_ms):
                match effect:
                    case SendFrame(message=message, session=session):
                        if isinstance(message, (PrefillDone, PrefillFailed)):
                            self.completions[session, message.slot, message.epoch] += 1
                        if isinstance(message, PrefillDone):
                            self.done.append(message)
                        events.extend(filter(None, [self.port.send(effect, now_ms)]))
                    case RunChunk() | StoreBlocks():
                        self.chunks.append(effect)
                    case ExitNode():
                        self.exit = effect
            self.core.check()
        assert all(times == 1 for times in self.completions.values()), "INV-7: answered twice"
        assert len(self.chunks) <= 1, "compute was given two commands at once"

    @property
    def index(self) -> PrefixIndex:
        return self.core.line.cache


class PrefixDevice(Device):
    """The decode node's compute thread with the bytes of its prefix cache. computed: as `PrefixSlab`'s."""

    def __init__(self, block_tokens: int) -> None:
        super().__init__()
        self.blocks = Blocks(block_tokens)
        self.computed = 0

    def carry_out(self) -> Any | None:
        command = self.commands[0]
        if isinstance(command, StoreBlocks):
            self.commands.popleft()
            return self.blocks.store(command, self.lanes[command.holder])
        if isinstance(command, commands.StartLocalPrefill):
            self.commands.popleft()
            return self._prefill(command)
        return super().carry_out()

    def _prefill(self, command: commands.StartLocalPrefill) -> ev.LocalPrefillEnded:
        damaged = self.blocks.first_damaged(command.places)
        cached_tokens = 0 if damaged is not None else command.cached_tokens
        row = self.blocks.copy(command.places, cached_tokens) if cached_tokens else []
        prompt = np.frombuffer(command.prompt, dtype="<i4").tolist()
        self.lanes[command.lane] = row + prompt[cached_tokens:]
        self.computed += len(prompt) - cached_tokens
        token_id = reason = None
        if not command.keep_token:
            sampler = self._sampler(command.job_id, command.sampling, command.prompt)
            sampled = sampler.sample(logits_of(self.lanes[command.lane]))
            token_id, reason = sampled.token_id, sampled.finish_reason
        return ev.LocalPrefillEnded(
            command.job_id, command.lane, token_id, reason, 1_000, cached_tokens, damaged
        )

    def _import(self, command: commands.StartImport) -> ev.ImportEnded:
        record, start = command.record, command.send_from
        damaged = self.blocks.first_damaged(command.places) if start else None
        slot = self.mappings[command.session].slots[record.slot]
        row = self.blocks.copy(command.places, start) if start and damaged is None else []
        self.lanes[command.lane] = row + slot.token_ids[start : record.token_count]
        code = ErrorCode.KV_CORRUPT if damaged is not None else _fault(record, slot, start)
        decoding = code is None and command.job_id in self.samplers
        if decoding:
            self.running[command.lane] = (command.job_id, command.token_id)
        return ev.ImportEnded(
            command.job_id,
            command.lane,
            code,
            "" if code is None else "bad KV",
            copy_us=10,
            digest_us=10,
            convert_us=0,
            decoding=decoding,
            corrupt_place=damaged,
        )


def _fault(record: PrefillDone, slot: SlotMemory, start: int) -> ErrorCode | None:
    bounds = chunk_bounds(start, record.token_count, record.chunk_tokens)
    for (first, end), digest in zip(bounds, record.chunk_digests, strict=True):
        if bytes_digest(bytes(slot.token_ids[first:end])) != digest:
            return ErrorCode.KV_CORRUPT
    return None if slot.epoch == record.epoch else ErrorCode.KV_STALE


class PrefixPair(Pair):
    """`Pair` with a cache of so many places in each node."""

    def __init__(
        self,
        *,
        places: int = PLACES,
        prefill_places: int = PLACES,
        per_client: bool = False,
        slots: int = 2,
        route: Route = ROUTE,
        **settings: Any,
    ) -> None:
        self._prefill_places = prefill_places
        prefix = PrefixSettings(places, IDENTITY, per_client, files=True)
        super().__init__(slots=slots, route=route, prefix=prefix, **settings)
        mappings, self.device = self.device.mappings, PrefixDevice(BLOCK)
        self.device.mappings = mappings
        self.files: deque[Any] = deque()

    def start_prefill(self, incarnation: str, profile: NodeProfile = PROFILE) -> None:
        self.prefill = PrefixPrefillSide(incarnation, self._slots, profile, self._prefill_places)
        self._slabs[incarnation] = self.prefill.slab

    def _execute(self, effect: Any) -> list[Any]:
        if isinstance(effect, StoreBlocks):
            self.device.commands.append(effect)
            return []
        return super()._execute(effect)

    @property
    def index(self) -> PrefixIndex:
        """The decode node's."""
        return self.core.cache.index

    def turn(self) -> bool:
        """The smallest piece of work that there is; whether there was any."""
        if self.prefill.chunks:
            self.prefill_chunk()
        elif self.device.commands:
            self.compute_one()
        elif self.device.running:
            for answer in self.device.step():
                self.step_decode(answer)
                self.deliver()
        else:
            return False
        return True

    def check_unlocked(self) -> None:
        """Nothing is going on, and nothing is locked."""
        assert self.core.idle
        for index in (self.index, self.prefill.index):
            status = index.status()
            assert (status["locks"], status["writing"], status["pinned"]) == (0, 0, 0)
            index.check()


def shorten(index: PrefixIndex, blocks: int) -> None:
    """Leave an index that knows one chain its first so many blocks."""
    for known in index.known_blocks()[blocks:]:
        index.forget(known.entry_id)
