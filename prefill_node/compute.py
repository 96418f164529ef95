"""The prefill node's compute thread.

Decides nothing: it loads the engine, then computes one chunk at a time into the slab and says so. Commands
come through a bounded queue, answers go to the loop's mailbox; every command is answered exactly once. It
must never touch a socket, and must give a slot its epoch before it writes the first byte of a production.
"""

import mmap
import threading
import traceback
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from common.block_store import BlockCorrupt, BlockStore
from common.clock import now_us
from common.digests import bytes_digest
from common.engines.interface import PrefillEngine
from common.engines.loading import EngineLoaded, LoadFailed, load_or_fail
from common.engines.registry import EngineSettings, load_prefill_engine
from common.errors import ErrorCode
from common.hooks import HoldPoints
from common.kv_convert import KvConverter
from common.kv_layout import KvLayout
from common.log import NodeLog
from common.log_events import LogEvent
from common.prefix_commands import BlocksStored, StoreBlocks
from prefill_node.events import (
    ChunkComputed,
    ComputeFailed,
    PrefixCorrupt,
    RunChunk,
)
from transport.loop import Commands, Mailbox
from transport.slab import Slab


class PrefillCompute:
    """The one thread that may use the engine."""

    def __init__(self, settings: EngineSettings, mailbox: Mailbox, hooks: HoldPoints, log: NodeLog) -> None:
        self._settings = settings
        self._mailbox = mailbox
        self._hooks = hooks
        self._log = log
        self._commands = Commands()
        self._slab: Slab | None = None
        self._layout: KvLayout | None = None
        self._wire_layout: KvLayout | None = None
        self._converter: KvConverter | None = None
        self._slots: list[memoryview] = []
        self._store: BlockStore | None = None
        self._attached = threading.Event()
        self._thread = threading.Thread(target=mailbox.guard, args=(self._run,), name="compute", daemon=True)

    def start(self) -> None:
        """Begin loading; the mailbox gets EngineLoaded or LoadFailed."""
        self._thread.start()

    def attach(self, slab: Slab, wire_layout: KvLayout, store: BlockStore) -> None:
        """Give the engine its slab and the prefix cache its memory; chunks may follow.

        A slab in another number format than the engine's is filled by conversion, out of slots of its own.
        """
        self._store = store
        self._slab = slab
        self._wire_layout = wire_layout
        self._attached.set()

    def put(self, command: RunChunk | StoreBlocks) -> None:
        """Have a command carried out; the mailbox gets its one answer."""
        self._commands.put(command)

    def stop(self) -> None:
        """End the thread once its current chunk is done."""
        self._attached.set()
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        engine = load_or_fail(lambda: load_prefill_engine(self._settings))
        if isinstance(engine, LoadFailed):
            self._mailbox.put(engine)
            return
        self._layout = engine.capabilities.layout
        self._mailbox.put(EngineLoaded(engine.capabilities))
        self._attached.wait()
        if self._slab is not None:
            self._slots = self._engine_slots(engine)
            engine.attach(self._slots)
        while (command := self._commands.get()) is not None:
            self._mailbox.put(self._answer(engine, command))
        engine.attach([])

    def _engine_slots(self, engine: PrefillEngine) -> list[memoryview]:
        """The memory that the engine computes into: the slab, or as many slots of its own form."""
        slab, layout = self._slab, self._layout
        if self._wire_layout == layout:
            return [slab.slot(index) for index in range(slab.slot_count)]
        form = engine.capabilities.form
        wire_form = replace(form, dtype=self._wire_layout.dtype)
        self._converter = KvConverter(form, wire_form, layout.head_dim)
        return [memoryview(mmap.mmap(-1, layout.slot_bytes)) for _ in range(slab.slot_count)]

    def _answer(self, engine: PrefillEngine, command: RunChunk | StoreBlocks) -> Any:
        if isinstance(command, StoreBlocks):
            return self._keep(command)
        try:
            return self._compute(engine, command)
        except BlockCorrupt as error:
            return PrefixCorrupt(command.slot, command.epoch, error.place)
        except Exception as error:
            trace = traceback.format_exc()
            self._log.error(LogEvent.COMPUTE_FAILED, job=command.job_id, traceback=trace)
            return ComputeFailed(command.slot, command.epoch, f"{type(error).__name__}: {error}")

    def _compute(self, engine: PrefillEngine, command: RunChunk) -> ChunkComputed | ComputeFailed:
        if not command.digests:
            if xxhash.xxh3_128_hexdigest(command.prompt) != command.prompt_digest:
                # The record repeats the digest: nobody else would notice that the prompt is another one.
                detail = "the prompt does not match its digest: it has changed on the way"
                return ComputeFailed(command.slot, command.epoch, detail, ErrorCode.KV_CORRUPT)
            self._slab.begin(command.slot, command.epoch)
            self._copy_prefix(command)
        self._hooks.at("prefill.chunk")
        prompt = np.frombuffer(command.prompt, dtype="<i4").astype(np.int64)
        started_us = now_us()
        logits = None
        if command.end > command.cached_tokens:
            first = max(command.start, command.cached_tokens)
            logits = engine.prefill_chunk(command.slot, prompt, first, command.end)
        busy_us = now_us() - started_us
        convert_us = self._convert(command)
        digest = self._digest(command.slot, command.start, command.end)
        if logits is not None and not self._intact(command):
            detail = "the KV of an earlier chunk changed in the slab while the prompt was computed"
            return ComputeFailed(command.slot, command.epoch, detail, ErrorCode.KV_CORRUPT)
        row = None if logits is None else np.ascontiguousarray(logits, dtype="<f4").tobytes()
        if self._hooks.at("prefill.computed") == "corrupt":
            self._slab.slot(command.slot)[0] ^= 0xFF
        self._hooks.at("prefill.answer")
        return ChunkComputed(
            command.slot,
            command.epoch,
            command.end,
            digest,
            busy_us,
            row,
            None if row is None else bytes_digest(row),
            convert_us,
        )

    def _intact(self, command: RunChunk) -> bool:
        """Whether the chunks that the logits were computed from still are what they were.

        The importer would find the damage too, but only after the first token was sampled.
        """
        return all(
            self._digest(command.slot, start, end) == digest
            for (start, end), digest in zip(command.before, command.digests, strict=True)
        )

    def _copy_prefix(self, command: RunChunk) -> None:
        """Copy what is cached to where it would be computed. Raises `BlockCorrupt`."""
        tokens = self._store.block_shape[2]
        slot = self._rows(command.slot)
        for number, place in enumerate(command.places):
            start = number * tokens
            end = min(start + tokens, command.cached_tokens)
            slot[:, :, start:end] = self._store.read(place)[:, :, : end - start]

    def _keep(self, command: StoreBlocks) -> BlocksStored:
        """Copy blocks of a slot to the prefix cache."""
        tokens = self._store.block_shape[2]
        slot = self._rows(command.holder)
        for store in command.stores:
            self._store.write(store.place, slot[:, :, store.start_tokens : store.start_tokens + tokens])
        return BlocksStored(tuple(store.entry_id for store in command.stores), ())

    def _rows(self, index: int) -> np.ndarray:
        """A slot as bytes, `[layer, 2, token, kv_head, bytes of one head's row]`."""
        layout = self._layout
        slot = np.frombuffer(self._slots[index], dtype=np.uint8)
        return slot.reshape(layout.layers, 2, layout.max_tokens, layout.kv_heads, -1)

    def _convert(self, command: RunChunk) -> int:
        """Write a chunk to the slab in wire form, if the engine has not; the time it took in microseconds."""
        if self._converter is None:
            return 0
        started_us = now_us()
        source, target = (
            np.frombuffer(memory, dtype=layout.numpy_dtype).reshape(layout.shape)
            for memory, layout in (
                (self._slots[command.slot], self._layout),
                (self._slab.slot(command.slot), self._wire_layout),
            )
        )
        chunk = slice(command.start, command.end)
        self._converter.convert(source[:, :, chunk], out=target[:, :, chunk])
        return now_us() - started_us

    def _digest(self, slot_index: int, start: int, end: int) -> bytes:
        """Digest of positions `[start, end)` in wire order: per layer, K then V, its tokens."""
        layout = self._wire_layout
        slot = np.frombuffer(self._slab.slot(slot_index), dtype=np.uint8)
        runs = slot.reshape(2 * layout.layers, layout.max_tokens * layout.row_bytes)
        hasher = xxhash.xxh3_128()
        for run in runs:
            hasher.update(run[start * layout.row_bytes : end * layout.row_bytes])
        return hasher.digest()
