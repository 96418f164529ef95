"""The decode node's compute thread.

Decides only the order of work on one device: commands first, then some pieces of an import or a chunk of a
local prefill, then one decode step of all running lanes, and again. It owns the engine and the samplers of
live jobs. Commands come through a bounded queue, answers go to the loop's mailbox; every command is answered
as `decode_node.events` says, exactly once. It must never touch a socket, and never sample from what was not
verified.
"""

import queue
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from common.block_store import BlockCorrupt, BlockStore
from common.clock import now_us
from common.digests import bytes_digest
from common.engines.interface import DecodeEngine
from common.engines.loading import EngineLoaded, LoadFailed, load_or_fail
from common.engines.registry import EngineSettings, load_decode_engine
from common.errors import ErrorCode
from common.hooks import HoldPoints
from common.kv_layout import chunk_bounds
from common.log import NodeLog
from common.log_events import LogEvent
from common.prefix_commands import StoreBlocks
from common.sampling import SamplingParams
from decode_node import commands
from decode_node import events as ev
from decode_node.cache_files import FILE_COMMANDS, CacheFiles
from decode_node.kv_import import ImportFrom, KvImport, KvSource, copy_blocks
from decode_node.lane_storing import SLICE_US, LaneStoring
from decode_node.sampler import JobSampler
from transport.loop import Commands, Mailbox


@dataclass(slots=True)
class _Running:
    """A lane that decodes: its job and the token to feed next.

    known_token: what the next step would sample, if that is known already. choice: which answer of the job it
    is. keep_logits: the next step's are those that all answers begin with.
    """

    job_id: str
    token_id: int
    stepped: bool = False
    known_token: int | None = None
    choice: int = 0
    keep_logits: bool = False


@dataclass(slots=True)
class _Filling:
    """A lane that is being filled: the work left, one piece or chunk per `next`."""

    job_id: str
    work: Iterator[None]


class DecodeCompute:
    """The one thread that may use the engine and the samplers."""

    def __init__(
        self,
        settings: EngineSettings,
        mailbox: Mailbox,
        hooks: HoldPoints,
        log: NodeLog,
    ) -> None:
        self._settings = settings
        self._eos_token_ids: frozenset[int] = frozenset()
        self._mailbox = mailbox
        self._hooks = hooks
        self._log = log
        self._commands = Commands()
        self._running: dict[int, _Running] = {}
        self._filling: dict[int, _Filling] = {}
        self._storing = LaneStoring(mailbox, self._explain)
        self._idle_since_us: dict[int, int] = {}
        self._store: BlockStore | None = None
        self._files: CacheFiles | None = None
        self._samplers: dict[str, JobSampler] = {}
        self._first_logits: dict[str, np.ndarray] = {}  # of jobs with several answers
        self._engine: DecodeEngine | None = None
        self._thread = threading.Thread(target=mailbox.guard, args=(self._run,), name="compute", daemon=True)
        self._handlers = {
            commands.SampleFirst: self._sample_first,
            ImportFrom: self._start_import,
            commands.StartLocalPrefill: self._start_local_prefill,
            commands.StartDecode: self._start_decode,
            commands.StartChoice: self._start_choice,
            commands.StopLane: self._stop_lane,
            commands.ForgetJob: self._forget_job,
            StoreBlocks: self._storing.begin,
            **dict.fromkeys(FILE_COMMANDS, self._start_file),
        }

    def start(self) -> None:
        """Begin loading; the mailbox gets EngineLoaded or LoadFailed."""
        self._thread.start()

    def use_eos(self, token_ids: frozenset[int]) -> None:
        """Say which ids end an answer, before the first command."""
        self._eos_token_ids = token_ids

    def use_store(self, store: BlockStore, files: CacheFiles | None = None) -> None:
        """Give the prefix cache its memory, and the way to its files, before the first command."""
        self._store = store
        self._storing.use(store)
        self._files = files

    def put(self, command: Any) -> None:
        """Have a command carried out."""
        self._commands.put(command)

    def stop(self) -> None:
        """End the thread; nothing may be running."""
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        engine = load_or_fail(lambda: load_decode_engine(self._settings))
        if isinstance(engine, LoadFailed):
            self._mailbox.put(engine)
            return
        self._engine = engine
        self._storing.read_from(self._engine)
        self._mailbox.put(EngineLoaded(self._engine.capabilities))
        while True:
            filing = self._files is not None and self._files.busy
            busy = bool(self._running or self._filling or self._storing.busy or filing)
            try:
                command = self._commands.get(block=not busy)
            except queue.Empty:
                self._work()
                continue
            if command is None:
                if self._files is not None:
                    self._files.close()
                return
            self._handlers[type(command)](command)

    def _work(self) -> None:
        """One bounded unit of each kind of work that there is."""
        for lane in list(self._filling):
            self._fill(lane)
        if self._running:
            self._step_lanes()
        self._storing.work()
        if self._files is not None and self._files.busy:
            self._files.work()

    def _start_file(self, command: Any) -> None:
        self._files.start(command)

    def _sample_first(self, command: commands.SampleFirst) -> None:
        record = command.record
        if bytes_digest(record.logits) != record.logits_digest:
            detail = "the logits do not match their digest"
            self._mailbox.put(ev.LogitsRefused(command.job_id, ErrorCode.KV_CORRUPT, detail))
            return
        sampler = self._sampler(command.job_id, command.sampling, command.prompt)
        try:
            sampled = sampler.sample(np.frombuffer(record.logits, dtype="<f4"))
        except ValueError as error:
            self._mailbox.put(ev.LogitsRefused(command.job_id, ErrorCode.KV_CORRUPT, str(error)))
            return
        self._mailbox.put(
            ev.FirstTokenSampled(command.job_id, sampled.token_id, sampled.finish_reason, sampled.logprobs)
        )

    def _sampler(self, job_id: str, sampling: SamplingParams, prompt: bytes) -> JobSampler:
        if job_id not in self._samplers:
            self._samplers[job_id] = JobSampler(sampling, self._eos_token_ids, prompt=prompt)
        return self._samplers[job_id]

    def _start_import(self, order: ImportFrom) -> None:
        command = order.start
        self._storing.finish(command.lane, command.places)
        if command.sampling is not None:
            self._sampler(command.job_id, command.sampling, command.prompt)
        work = self._import(command, order.source)
        self._filling[command.lane] = _Filling(command.job_id, work)

    def _import(self, command: commands.StartImport, source: KvSource) -> Iterator[None]:
        kv = KvImport(
            source,
            command.record,
            self._engine,
            command.lane,
            command.send_from,
        )
        try:
            if command.send_from:
                yield from kv.prefix(self._store, command.places)
            for _ in kv.pieces() if kv.code is None else ():
                self._hooks.at("import.piece")
                yield
        except Exception as error:
            kv.code, kv.detail = ErrorCode.ENGINE_ERROR, self._explain(error, command.job_id)
        many = command.sampling is not None and command.sampling.n > 1
        logits = kv.logits() if many and kv.code is None else None
        decoding = kv.code is None and command.job_id in self._samplers
        if decoding and logits is not None:
            self._first_logits[command.job_id] = logits
        if decoding and not many:
            known_token = command.known_token
            self._running[command.lane] = _Running(command.job_id, command.token_id, known_token=known_token)
        self._mailbox.put(
            ev.ImportEnded(
                command.job_id,
                command.lane,
                kv.code,
                kv.detail,
                kv.copy_us,
                kv.digest_us,
                kv.convert_us,
                decoding,
                kv.corrupt_place,
            )
        )

    def _start_local_prefill(self, command: commands.StartLocalPrefill) -> None:
        self._storing.finish(command.lane, command.places)
        work = self._local_prefill(command)
        self._filling[command.lane] = _Filling(command.job_id, work)

    def _local_prefill(self, command: commands.StartLocalPrefill) -> Iterator[None]:
        prompt = np.frombuffer(command.prompt, dtype="<i4").astype(np.int64)
        sampler = self._sampler(command.job_id, command.sampling, command.prompt)
        busy_us = 0
        logits = corrupt_place = None
        first = command.cached_tokens
        try:
            yield from copy_blocks(self._store, command.places, first, self._engine, command.lane)
        except BlockCorrupt as error:
            first, corrupt_place = 0, error.place
        for start, end in chunk_bounds(first, len(prompt), self._engine.capabilities.chunk_tokens):
            self._hooks.at("local.chunk")
            started_us = now_us()
            logits = self._prefill_chunk(command.lane, prompt, start, end)
            busy_us += now_us() - started_us
            if end < len(prompt):
                self._mailbox.put(ev.LocalChunkComputed(command.job_id, command.lane))
                yield
        if command.sampling.n > 1 and command.job_id in self._samplers:
            self._first_logits[command.job_id] = logits
        unwanted = command.keep_token or command.sampling.n > 1
        sampled = None if unwanted else sampler.sample(logits)
        token_id = reason = logprobs = None
        if sampled is not None:
            token_id, reason, logprobs = sampled.token_id, sampled.finish_reason, sampled.logprobs
        self._mailbox.put(
            ev.LocalPrefillEnded(
                command.job_id, command.lane, token_id, reason, busy_us, first, corrupt_place, logprobs
            )
        )

    def _prefill_chunk(self, lane: int, prompt: np.ndarray, start: int, end: int) -> np.ndarray | None:
        engine = self._engine
        if engine.capabilities.local_prefill:
            return engine.prefill_chunk(lane, prompt, start, end)
        # A prompt of one token, whose prefill node answers no logits: there is nothing to prefill.
        engine.set_length(lane, start)
        return engine.step([lane], [int(prompt[start])])[0]

    def _fill(self, lane: int) -> None:
        filling = self._filling[lane]
        until_us = now_us() + SLICE_US
        try:
            # A piece for each step of the other lanes would leave this one idle for as many steps.
            while True:
                next(filling.work)
                if now_us() >= until_us:
                    return
        except StopIteration:
            del self._filling[lane]
        except Exception as error:
            del self._filling[lane]
            detail = self._explain(error, filling.job_id)
            self._mailbox.put(ev.LaneFailed(filling.job_id, lane, detail))

    def _start_decode(self, command: commands.StartDecode) -> None:
        self._running[command.lane] = _Running(command.job_id, command.token_id)

    def _start_choice(self, command: commands.StartChoice) -> None:
        job_id, lane, choice, sampling = command.job_id, command.lane, command.choice, command.sampling
        self._running.pop(lane, None)
        self._storing.finish(lane)
        if sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + choice) % 2**63)
        sampler = JobSampler(sampling, self._eos_token_ids, prompt=command.prompt)
        self._samplers[job_id] = sampler
        logits = self._first_logits.get(job_id)
        if logits is None:
            # Nobody has computed the last prompt token yet: the first step does.
            last = int.from_bytes(command.prompt[-4:], "little")
            self._running[lane] = _Running(job_id, last, choice=choice, keep_logits=True)
            return
        self._engine.set_length(lane, len(command.prompt) // 4)
        try:
            sampled = sampler.sample(logits)
        except ValueError as error:
            self._mailbox.put(ev.LaneFailed(job_id, lane, str(error)))
            return
        if sampled.finish_reason is None:
            self._running[lane] = _Running(job_id, sampled.token_id, stepped=True, choice=choice)
        token, reason = sampled.token_id, sampled.finish_reason
        self._mailbox.put(ev.TokenSampled(job_id, lane, token, reason, 0, None, sampled.logprobs, choice))

    def _stop_lane(self, command: commands.StopLane) -> None:
        if self._running.pop(command.lane, None) is not None:
            self._idle_since_us[command.lane] = now_us()
        self._filling.pop(command.lane, None)
        self._storing.finish(command.lane)
        self._engine.set_length(command.lane, 0)
        self._mailbox.put(ev.LaneStopped(command.lane))

    def _forget_job(self, command: commands.ForgetJob) -> None:
        self._samplers.pop(command.job_id, None)
        self._first_logits.pop(command.job_id, None)
        # A job that ended while its copy did has begun to decode; StopLane follows.
        for lane in [lane for lane, item in self._running.items() if item.job_id == command.job_id]:
            self._end_decode(lane)

    def _step_lanes(self) -> None:
        lanes = sorted(self._running)
        running = [self._running[lane] for lane in lanes]
        started_us = now_us()
        try:
            self._hooks.at("decode.step")
            logits = self._engine.step(lanes, [item.token_id for item in running])
        except Exception as error:
            detail = self._explain(error, running[0].job_id)
            for lane, item in zip(lanes, running, strict=True):
                self._end_decode(lane)
                self._mailbox.put(ev.LaneFailed(item.job_id, lane, detail))
            return
        for row, lane, item in zip(logits, lanes, running, strict=True):
            self._take_token(row, lane, item, started_us)

    def _explain(self, error: Exception, job_id: str) -> str:
        """One line for the client; the traceback is for the log."""
        self._log.error(LogEvent.COMPUTE_FAILED, job=job_id, traceback=traceback.format_exc())
        return f"{type(error).__name__}: {error}"

    def _take_token(self, row: np.ndarray, lane: int, item: _Running, started_us: int) -> None:
        if item.known_token is not None:
            item.token_id, item.known_token = item.known_token, None
            return
        if item.keep_logits:
            self._first_logits[item.job_id], item.keep_logits = row.copy(), False
        try:
            sampled = self._samplers[item.job_id].sample(row)
        except ValueError as error:
            self._end_decode(lane)
            self._mailbox.put(ev.LaneFailed(item.job_id, lane, str(error)))
            return
        gap_us = None if item.stepped else self._lane_gap_us(lane, started_us)
        item.token_id, item.stepped = sampled.token_id, True
        busy_us = now_us() - started_us
        if sampled.finish_reason is not None:
            self._end_decode(lane)
        self._mailbox.put(
            ev.TokenSampled(
                item.job_id,
                lane,
                sampled.token_id,
                sampled.finish_reason,
                busy_us,
                gap_us,
                sampled.logprobs,
                item.choice,
            )
        )

    def _lane_gap_us(self, lane: int, started_us: int) -> int | None:
        """From the last token of the lane's former job to this job's first step."""
        idle_since_us = self._idle_since_us.get(lane)
        return None if idle_since_us is None else started_us - idle_since_us

    def _end_decode(self, lane: int) -> None:
        del self._running[lane]
        self._idle_since_us[lane] = now_us()
