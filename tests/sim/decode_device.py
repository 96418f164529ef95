"""The modelled compute and text threads of a decode process.

Compute takes its commands in order, then does one piece of every lane that is being filled and one step of
every lane that decodes, as `decode_node.compute` does; its answers wait in a mailbox until the loop takes
them. Text answers each command in order.
"""

from collections import deque
from dataclasses import dataclass
from types import NoneType
from typing import Any

from common.errors import ErrorCode
from common.kv_layout import chunk_bounds
from common.messages import PrefillDone
from common.sampling import SamplingParams
from decode_node import commands
from decode_node import events as ev
from tests.sim import memory
from tests.sim.memory import Slab
from tests.sim.plan import CHUNK_TOKENS


@dataclass(slots=True)
class Filling:
    """A lane that is being filled: by an import (`slab` is given) or by a local prefill."""

    job_id: str
    slab: Slab | None
    command: Any
    start: int = 0
    folded: int = 0


@dataclass(slots=True)
class Sampler:
    """The sampler of one job: how many tokens it has taken."""

    sampling: SamplingParams
    count: int = 0

    def take(self, token: int) -> str | None:
        """Count a token; why it is the last, if it is."""
        self.count += 1
        if self.sampling.stop_token_ids and token % memory.EOS_DIVISOR == 0:
            return "stop"
        return "length" if self.count >= self.sampling.max_tokens else None


class DecodeDevice:
    """The compute thread. unreadable: slabs whose reads fail now."""

    def __init__(self) -> None:
        self.commands: deque[Any] = deque()
        self.mailbox: deque[Any] = deque()
        self.filling: dict[int, Filling] = {}
        self.running: dict[int, tuple[str, int]] = {}
        self.folded: dict[int, int] = {}
        self.samplers: dict[str, Sampler] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.commands or self.filling or self.running)

    @property
    def owes(self) -> bool:
        """Whether what it does next is answered."""
        first = self.commands[0] if self.commands else None
        return bool(self.filling or self.running) or not isinstance(first, (NoneType, commands.ForgetJob))

    def work(self, unreadable: bool) -> None:
        """One command, or one round of pieces and steps."""
        if self.commands:
            answer = self._carry_out(self.commands.popleft())
            if answer is not None:
                self.mailbox.append(answer)
            return
        for lane in list(self.filling):
            self._fill(lane, unreadable)
        for lane in sorted(self.running):
            self._step(lane)

    def fail(self) -> None:
        """The engine raises: in a copy it ends the copy, in a step all lanes that step."""
        for lane, item in list(self.filling.items()):
            del self.filling[lane]
            if item.slab is None:
                self.mailbox.append(ev.LaneFailed(item.job_id, lane, "the engine raised"))
            else:
                self._end_import(lane, item, ErrorCode.ENGINE_ERROR)
        for lane, (job_id, _) in list(self.running.items()):
            del self.running[lane]
            self.mailbox.append(ev.LaneFailed(job_id, lane, "the engine raised"))

    def _carry_out(self, command: Any) -> Any | None:
        match command:
            case commands.SampleFirst():
                return self._sample_first(command)
            case (commands.StartImport() as start, slab):
                self.filling[start.lane] = Filling(start.job_id, slab, start)
            case commands.StartLocalPrefill(job_id=job_id, lane=lane):
                self._sampler(job_id, command.sampling)
                self.filling[lane] = Filling(job_id, None, command)
            case commands.StartDecode(job_id=job_id, lane=lane, token_id=token_id):
                self.running[lane] = (job_id, token_id)
            case commands.StopLane(lane=lane):
                self.running.pop(lane, None)
                self.filling.pop(lane, None)
                return ev.LaneStopped(lane)
            case commands.ForgetJob(job_id=job_id):
                self.samplers.pop(job_id, None)
                for lane in [lane for lane, item in self.running.items() if item[0] == job_id]:
                    del self.running[lane]
        return None

    def _sampler(self, job_id: str, sampling: SamplingParams) -> Sampler:
        sampler = self.samplers.get(job_id)
        if sampler is None:
            sampler = self.samplers[job_id] = Sampler(sampling)
        return sampler

    def _sample_first(self, command: commands.SampleFirst) -> Any:
        record = command.record
        if record.logits_digest != record.logits[:4] * 4:
            return ev.LogitsRefused(command.job_id, ErrorCode.KV_CORRUPT, "the logits are not theirs")
        token = int.from_bytes(record.logits[:4], "little")
        reason = self._sampler(command.job_id, command.sampling).take(token)
        return ev.FirstTokenSampled(command.job_id, token, reason)

    def _fill(self, lane: int, unreadable: bool) -> None:
        item = self.filling[lane]
        if item.slab is None:
            self._local_chunk(lane, item)
        elif unreadable:
            self._end_import(lane, item, ErrorCode.ENGINE_ERROR)
        else:
            self._copy_piece(lane, item)

    def _copy_piece(self, lane: int, item: Filling) -> None:
        """Copy and verify one chunk; after the last, compare the epoch."""
        record: PrefillDone = item.command.record
        content = item.slab.read(record.slot, item.start)
        stale = item.slab.epochs[record.slot] != record.epoch
        if memory.digest_of(content) != record.chunk_digests[item.start // CHUNK_TOKENS]:
            self._end_import(lane, item, ErrorCode.KV_STALE if stale else ErrorCode.KV_CORRUPT)
            return
        item.folded = memory.mix(item.folded, content)
        item.start += CHUNK_TOKENS
        if item.start >= record.token_count:
            self._end_import(lane, item, ErrorCode.KV_STALE if stale else None)

    def _end_import(self, lane: int, item: Filling, code: ErrorCode | None) -> None:
        self.filling.pop(lane, None)
        job_id = item.job_id
        decoding = code is None and job_id in self.samplers
        if decoding:
            self.folded[lane] = item.folded
            self.running[lane] = (job_id, item.command.token_id)
        detail = "" if code is None else "bad KV"
        self.mailbox.append(ev.ImportEnded(job_id, lane, code, detail, 10, 10, 0, decoding))

    def _local_chunk(self, lane: int, item: Filling) -> None:
        prompt = item.command.prompt
        length = len(prompt) // 4
        [(_, end), *more] = chunk_bounds(item.start, length, CHUNK_TOKENS)
        item.folded = memory.mix(item.folded, memory.content_of(prompt, end))
        item.start = end
        if more:
            self.mailbox.append(ev.LocalChunkComputed(item.job_id, lane))
            return
        del self.filling[lane]
        self.folded[lane] = item.folded
        token, reason = None, None
        if not item.command.keep_token:
            token = memory.next_token(item.folded)
            reason = self.samplers[item.job_id].take(token)
        self.mailbox.append(ev.LocalPrefillEnded(item.job_id, lane, token, reason, 1_000))

    def _step(self, lane: int) -> None:
        job_id, token_id = self.running[lane]
        self.folded[lane] = memory.mix(self.folded[lane], token_id)
        token = memory.next_token(self.folded[lane])
        reason = self.samplers[job_id].take(token)
        if reason is None:
            self.running[lane] = (job_id, token)
        else:
            del self.running[lane]
        self.mailbox.append(ev.TokenSampled(job_id, lane, token, reason, 1_000, None))


class TextDevice:
    """The text thread. streams: jobs that it knows, and whether a stop text has ended them."""

    def __init__(self) -> None:
        self.commands: deque[Any] = deque()
        self.streams: dict[str, SamplingParams] = {}

    def work(self) -> Any | None:
        """The answer to the first command, if it has one."""
        command = self.commands.popleft()
        match command:
            case commands.PrepareSubmission():
                return self._prepare(command)
            case commands.PushTokens(job_id=job_id, token_id=token_id, final=final) if job_id in self.streams:
                stopped = bool(self.streams[job_id].stop) and token_id % memory.STOP_DIVISOR == 0
                return ev.TextProduced(job_id, (token_id,), "", stopped, final)
            case commands.ForgetJob(job_id=job_id):
                self.streams.pop(job_id, None)
        return None

    def _prepare(self, command: commands.PrepareSubmission) -> Any:
        submit, job_id = command.submit, command.job_id
        prompt = submit.prompt_ids or ()
        fields = submit.sampling
        stop_token_ids = (0,) if fields["eos"] else ()
        sampling = SamplingParams(
            fields["max_tokens"], stop=("x",) if fields["stop"] else (), stop_token_ids=stop_token_ids
        )
        if not prompt:
            return ev.SubmissionRefused(job_id, ErrorCode.EMPTY_PROMPT, "empty")
        if len(prompt) + sampling.max_tokens > command.token_limit:
            return ev.SubmissionRefused(job_id, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long")
        self.streams[job_id] = sampling
        return ev.SubmissionPrepared(job_id, memory.prompt_bytes(prompt), str(hash(prompt)), sampling)
