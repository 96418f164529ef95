"""Compute, text and memory of a pair of nodes, by hand: what the pure cores are joined to in tests.

The model is arithmetic on whole sequences: a slot and a lane hold the ids whose KV they hold, and the next
token hashes all of them, so one wrong, missing or foreign position changes the answer. Nothing here runs by
itself; a test says when a command is carried out.
"""

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.digests import bytes_digest, prompt_digest
from common.errors import ErrorCode
from common.kv_layout import KvLayout, chunk_bounds
from common.messages import NodeProfile, PrefillDone
from decode_node import commands
from decode_node import events as ev
from decode_node.sampler import JobSampler, ending_token_ids
from decode_node.submission import Refusal, prepare, tokenize
from decode_node.text import TextStream, spelled_logprobs
from prefill_node.events import ChunkComputed, RunChunk

VOCABULARY = 26
CHUNK_TOKENS = 4
MAX_TOKENS = 64
PROFILE = NodeProfile(
    "letters", "weights", "tokenizer", 1, 1, 1, VOCABULARY, "uint8", "half", MAX_TOKENS, CHUNK_TOKENS
)
TOKEN_BYTES = 2
LAYOUT = KvLayout(1, 1, 1, "uint8", MAX_TOKENS)


def next_token(token_ids: Sequence[int]) -> int:
    return zlib.crc32(bytes(token_ids)) % VOCABULARY


def expected_tokens(prompt_ids: Sequence[int], count: int) -> list[int]:
    """What a single process would generate."""
    token_ids = list(prompt_ids)
    for _ in range(count):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt_ids) :]


def logits_of(token_ids: Sequence[int]) -> np.ndarray:
    row = np.zeros(VOCABULARY, dtype="<f4")
    row[next_token(token_ids)] = 1.0
    return row


def letters(token_ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token_id) for token_id in token_ids)


class LetterTokenizer:
    vocab_size = VOCABULARY
    eos_token_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))

    def decode(self, token_ids: list[int]) -> str:
        return letters(token_ids)


class Text:
    """The text thread: answers at once, in order."""

    def __init__(self) -> None:
        self.streams: dict[str, TextStream] = {}

    def carry_out(self, command: Any) -> Any | None:
        match command:
            case commands.PrepareSubmission(job_id=job_id):
                return self._prepare(job_id, command)
            case commands.TokenizeText(session=session, request=request):
                result = tokenize(request.prompt, request.messages, request.token_ids, LetterTokenizer())
                if isinstance(result, Refusal):
                    return ev.TokenizeRefused(session, request.label, result.code, result.detail)
                return ev.TextTokenized(session, request.label, result.token_ids, result.text)
            case commands.PushTokens(job_id=job_id) if job_id in self.streams:
                stream = self.streams[job_id]
                delta = stream.push((command.token_id,))
                rest = stream.finish().text if command.final and not delta.stopped else ""
                token_ids, text = (command.token_id,), delta.text + rest
                logprobs = spelled_logprobs(command.logprobs, LetterTokenizer())
                return ev.TextProduced(job_id, token_ids, text, delta.stopped, command.final, logprobs)
            case commands.ForgetJob(job_id=job_id):
                self.streams.pop(job_id, None)
        return None

    def _prepare(self, job_id: str, command: commands.PrepareSubmission) -> Any:
        submit = command.submit
        result = prepare(
            submit.prompt,
            submit.messages,
            submit.prompt_ids,
            submit.sampling,
            LetterTokenizer(),
            command.token_limit,
        )
        if isinstance(result, Refusal):
            return ev.SubmissionRefused(job_id, result.code, result.detail)
        silent = ending_token_ids(result.sampling, frozenset())
        self.streams[job_id] = TextStream(
            LetterTokenizer(), result.sampling.stop, silent, result.sampling.min_tokens
        )
        prompt = np.asarray(result.prompt_ids, dtype="<i4").tobytes()
        return ev.SubmissionPrepared(job_id, prompt, prompt_digest(result.prompt_ids), result.sampling)


@dataclass(slots=True)
class SlotMemory:
    """One slot of a slab: its epoch and the ids whose KV it holds."""

    epoch: int = 0
    token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Slab:
    """The memory of one prefill process."""

    slots: list[SlotMemory]

    def compute(self, command: RunChunk) -> ChunkComputed:
        """Write one chunk and answer for it."""
        slot = self.slots[command.slot]
        if command.start == 0:
            slot.epoch, slot.token_ids = command.epoch, []
        prompt = np.frombuffer(command.prompt, dtype="<i4").tolist()
        slot.token_ids[command.start :] = prompt[command.start : command.end]
        digest = bytes_digest(bytes(slot.token_ids[command.start : command.end]))
        row = logits_of(slot.token_ids).tobytes() if command.end == len(prompt) else None
        logits_digest = None if row is None else bytes_digest(row)
        return ChunkComputed(command.slot, command.epoch, command.end, digest, 1_000, row, logits_digest)


class Device:
    """The decode node's compute thread: `carry_out` for commands, `step` for one decode step."""

    def __init__(self) -> None:
        self.mappings: dict[str, Slab] = {}
        self.commands: deque[Any] = deque()
        self.lanes: dict[int, list[int]] = {}
        self.running: dict[int, tuple[str, int]] = {}
        self.samplers: dict[str, JobSampler] = {}
        self.steps: list[str] = []

    def carry_out(self) -> Any | None:
        """The answer to the first waiting command."""
        command = self.commands.popleft()
        match command:
            case commands.SampleFirst():
                return self._sample_first(command)
            case commands.StartImport():
                return self._import(command)
            case commands.StartLocalPrefill(job_id=job_id, lane=lane):
                self.lanes[lane] = np.frombuffer(command.prompt, dtype="<i4").tolist()
                if command.keep_token:
                    return ev.LocalPrefillEnded(job_id, lane, None, None, 1_000)
                sampler = self._sampler(job_id, command.sampling, command.prompt)
                sampled = sampler.sample(logits_of(self.lanes[lane]))
                token_id, reason, logprobs = sampled.token_id, sampled.finish_reason, sampled.logprobs
                return ev.LocalPrefillEnded(job_id, lane, token_id, reason, 1_000, logprobs=logprobs)
            case commands.StartDecode(job_id=job_id, lane=lane, token_id=token_id):
                self.running[lane] = (job_id, token_id)
            case commands.StopLane(lane=lane):
                self.running.pop(lane, None)
                return ev.LaneStopped(lane)
            case commands.ForgetJob(job_id=job_id):
                self.samplers.pop(job_id, None)
                self.running = {lane: item for lane, item in self.running.items() if item[0] != job_id}
        return None

    def step(self) -> list[ev.TokenSampled]:
        """One decode step of every running lane."""
        return [self._step(lane) for lane in sorted(self.running)]

    def _step(self, lane: int) -> ev.TokenSampled:
        job_id, token_id = self.running[lane]
        self.steps.append(job_id)
        self.lanes[lane].append(token_id)
        sampled = self.samplers[job_id].sample(logits_of(self.lanes[lane]))
        self.running[lane] = (job_id, sampled.token_id)
        if sampled.finish_reason is not None:
            del self.running[lane]
        token_id, reason = sampled.token_id, sampled.finish_reason
        return ev.TokenSampled(job_id, lane, token_id, reason, 1_000, None, sampled.logprobs)

    def _sampler(self, job_id: str, sampling: Any, prompt: bytes) -> JobSampler:
        return self.samplers.setdefault(job_id, JobSampler(sampling, frozenset(), prompt=prompt))

    def _sample_first(self, command: commands.SampleFirst) -> Any:
        record, job_id = command.record, command.job_id
        if bytes_digest(record.logits) != record.logits_digest:
            return ev.LogitsRefused(job_id, ErrorCode.KV_CORRUPT, "the logits do not match their digest")
        row = np.frombuffer(record.logits, dtype="<f4")
        sampled = self._sampler(job_id, command.sampling, command.prompt).sample(row)
        return ev.FirstTokenSampled(job_id, sampled.token_id, sampled.finish_reason, sampled.logprobs)

    def _import(self, command: commands.StartImport) -> ev.ImportEnded:
        record = command.record
        slot = self.mappings[command.session].slots[record.slot]
        self.lanes[command.lane] = slot.token_ids[: record.token_count]
        code = _import_fault(record, slot)
        decoding = code is None and command.job_id in self.samplers
        if decoding:
            self.running[command.lane] = (command.job_id, command.token_id)
        detail = "" if code is None else "bad KV"
        return ev.ImportEnded(command.job_id, command.lane, code, detail, 10, 10, 0, decoding)


def _import_fault(record: PrefillDone, slot: SlotMemory) -> ErrorCode | None:
    bounds = chunk_bounds(0, record.token_count, record.chunk_tokens)
    for (start, end), digest in zip(bounds, record.chunk_digests, strict=True):
        if bytes_digest(bytes(slot.token_ids[start:end])) != digest:
            return ErrorCode.KV_CORRUPT
    return None if slot.epoch == record.epoch else ErrorCode.KV_STALE
