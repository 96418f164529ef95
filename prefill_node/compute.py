"""The prefill node's compute thread.

Decides nothing: it loads the engine, then computes one chunk at a time into the slab and says so. Commands
come through a bounded queue, answers go to the loop's mailbox; every command is answered exactly once. It
must never touch a socket, and must give a slot its epoch before it writes the first byte of a production.
"""

import threading
import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from common.clock import now_us
from common.digests import bytes_digest
from common.engines.interface import Capabilities, PrefillEngine
from common.engines.registry import EngineSettings, load_prefill_engine
from common.errors import ConfigError, ErrorCode
from common.hooks import HoldPoints
from common.kv_layout import KvLayout, chunk_bounds
from common.log import NodeLog
from common.log_events import LogEvent
from prefill_node.events import ChunkComputed, ComputeFailed, RunChunk
from transport.loop import Commands, Mailbox
from transport.slab import Slab


@dataclass(frozen=True, slots=True)
class EngineLoaded:
    """The engine is ready for `attach`."""

    capabilities: Capabilities


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine could not be loaded."""

    detail: str


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
        self._chunk_tokens = 0
        self._attached = threading.Event()
        self._thread = threading.Thread(target=mailbox.guard, args=(self._run,), name="compute", daemon=True)

    def start(self) -> None:
        """Begin loading; the mailbox gets EngineLoaded or EngineFailed."""
        self._thread.start()

    def attach(self, slab: Slab, layout: KvLayout) -> None:
        """Give the engine its slab; chunks may follow."""
        self._slab = slab
        self._layout = layout
        self._attached.set()

    def put(self, command: RunChunk) -> None:
        """Have one chunk computed; the mailbox gets ChunkComputed or ComputeFailed."""
        self._commands.put(command)

    def stop(self) -> None:
        """End the thread once its current chunk is done."""
        self._attached.set()
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            engine = load_prefill_engine(self._settings)
        except ConfigError as error:
            self._mailbox.put(EngineFailed(str(error)))
            return
        except Exception:
            self._mailbox.put(EngineFailed(traceback.format_exc()))
            return
        self._chunk_tokens = engine.capabilities.chunk_tokens
        self._mailbox.put(EngineLoaded(engine.capabilities))
        self._attached.wait()
        if self._slab is not None:
            engine.attach([self._slab.slot(index) for index in range(self._slab.slot_count)])
        while (command := self._commands.get()) is not None:
            self._mailbox.put(self._answer(engine, command))
        engine.attach([])

    def _answer(self, engine: PrefillEngine, command: RunChunk) -> Any:
        try:
            return self._compute(engine, command)
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
        self._hooks.at("prefill.chunk")
        prompt = np.frombuffer(command.prompt, dtype="<i4").astype(np.int64)
        started_us = now_us()
        logits = engine.prefill_chunk(command.slot, prompt, command.start, command.end)
        busy_us = now_us() - started_us
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
        )

    def _intact(self, command: RunChunk) -> bool:
        """Whether the chunks that the logits were computed from still are what they were.

        The importer would find the damage too, but only after the first token was sampled.
        """
        bounds = chunk_bounds(command.first, command.start, self._chunk_tokens)
        return all(
            self._digest(command.slot, start, end) == digest
            for (start, end), digest in zip(bounds, command.digests, strict=True)
        )

    def _digest(self, slot_index: int, start: int, end: int) -> bytes:
        """Digest of positions `[start, end)` in wire order: per layer, K then V, its tokens."""
        layout = self._layout
        slot = np.frombuffer(self._slab.slot(slot_index), dtype=np.uint8)
        runs = slot.reshape(2 * layout.layers, layout.max_tokens * layout.row_bytes)
        hasher = xxhash.xxh3_128()
        for run in runs:
            hasher.update(run[start * layout.row_bytes : end * layout.row_bytes])
        return hasher.digest()
