"""The decode node's text thread: text to tokens and back.

Decides nothing; runs `prepare` on what clients send and a `TextStream` for every live job, so that neither
the sockets nor compute wait for a tokenizer. Commands come through a bounded queue, answers go to the loop's
mailbox in the order of the commands. It must never touch a socket or the engine.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from common.digests import prompt_digest
from common.engines.interface import Tokenizer
from common.engines.loading import LoadFailed, load_or_fail
from common.engines.registry import EngineSettings, load_tokenizer
from common.errors import ErrorCode
from common.hooks import HoldPoints
from decode_node import commands
from decode_node import events as ev
from decode_node.sampler import ending_token_ids
from decode_node.submission import Refusal, prepare, tokenize
from decode_node.text import TextStream, spelled_logprobs
from transport.loop import Commands, Mailbox

_STOP_S = 1.0


@dataclass(frozen=True, slots=True)
class TokenizerLoaded:
    """The text thread is ready."""

    eos_token_ids: frozenset[int]


class _Answer:
    """The text of one job's answer, and of the next one when that begins."""

    def __init__(self, make_stream: Callable[[], TextStream]) -> None:
        self._make_stream = make_stream
        self._stream = make_stream()
        self._choice = 0

    def stream_of(self, choice: int) -> TextStream:
        if choice != self._choice:
            self._stream, self._choice = self._make_stream(), choice
        return self._stream


class TextThread:
    """The one thread that may use the tokenizer."""

    def __init__(self, settings: EngineSettings, mailbox: Mailbox, hooks: HoldPoints) -> None:
        self._settings = settings
        self._mailbox = mailbox
        self._hooks = hooks
        self._commands = Commands()
        self._answers: dict[str, _Answer] = {}
        self._tokenizer: Tokenizer | None = None
        self._thread = threading.Thread(target=mailbox.guard, args=(self._run,), name="text", daemon=True)
        self._handlers = {
            commands.PrepareSubmission: self._prepare,
            commands.TokenizeText: self._tokenize,
            commands.PushTokens: self._push,
            commands.ForgetJob: self._forget_job,
        }

    def start(self) -> None:
        """Begin loading; the mailbox gets TokenizerLoaded or LoadFailed."""
        self._thread.start()

    def put(self, command: Any) -> None:
        """Have a command carried out."""
        self._commands.put(command)

    def stop(self) -> None:
        """End the thread. A tokenizer that hangs is left to the end of the process."""
        self._commands.put(None)
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        tokenizer = load_or_fail(lambda: load_tokenizer(self._settings))
        if isinstance(tokenizer, LoadFailed):
            self._mailbox.put(tokenizer)
            return
        self._tokenizer = tokenizer
        self._mailbox.put(TokenizerLoaded(self._tokenizer.eos_token_ids))
        while (command := self._commands.get()) is not None:
            self._handlers[type(command)](command)

    def _prepare(self, command: commands.PrepareSubmission) -> None:
        try:
            self._hooks.at("text.prepare")
            self._mailbox.put(self._prepared(command))
        except BaseException as error:
            # The tokenizer is foreign code fed with foreign text: its failure, a panic too, is this job's
            # alone. Its words may quote the prompt.
            detail = f"the tokenizer failed on this prompt ({type(error).__name__})"
            self._mailbox.put(ev.SubmissionRefused(command.job_id, ErrorCode.INVALID_REQUEST, detail))

    def _prepared(self, command: commands.PrepareSubmission) -> Any:
        submit = command.submit
        result = prepare(
            submit.prompt,
            submit.messages,
            submit.prompt_ids,
            submit.sampling,
            self._tokenizer,
            command.token_limit,
        )
        if isinstance(result, Refusal):
            return ev.SubmissionRefused(command.job_id, result.code, result.detail)
        silent = ending_token_ids(result.sampling, self._tokenizer.eos_token_ids)
        self._answers[command.job_id] = _Answer(
            partial(TextStream, self._tokenizer, result.sampling.stop, silent, result.sampling.min_tokens)
        )
        prompt = np.asarray(result.prompt_ids, dtype="<i4").tobytes()
        shorter_digest = prompt_digest(result.prompt_ids[:-1])
        return ev.SubmissionPrepared(
            command.job_id, prompt, result.prompt_digest, result.sampling, shorter_digest
        )

    def _tokenize(self, command: commands.TokenizeText) -> None:
        session, request = command.session, command.request
        try:
            self._hooks.at("text.tokenize")
            result = tokenize(request.prompt, request.messages, request.token_ids, self._tokenizer)
        except BaseException as error:
            result = Refusal(
                ErrorCode.INVALID_REQUEST, f"the tokenizer failed on this request ({type(error).__name__})"
            )
        if isinstance(result, Refusal):
            answer = ev.TokenizeRefused(session, request.label, result.code, result.detail)
        else:
            answer = ev.TextTokenized(session, request.label, result.token_ids, result.text)
        self._mailbox.put(answer)

    def _push(self, command: commands.PushTokens) -> None:
        answer = self._answers.get(command.job_id)
        if answer is None:
            return  # the job has ended meanwhile
        stream = answer.stream_of(command.choice)
        try:
            self._hooks.at("text.push")
            delta = stream.push((command.token_id,))
            flush = command.final and not delta.stopped
            text = delta.text + (stream.finish().text if flush else "")
            logprobs = spelled_logprobs(command.logprobs, self._tokenizer)
        except BaseException as error:
            detail = f"the tokenizer failed on this answer ({type(error).__name__})"
            self._mailbox.put(ev.TextFailed(command.job_id, detail))
            return
        ids, choice = (command.token_id,), command.choice
        self._mailbox.put(
            ev.TextProduced(command.job_id, ids, text, delta.stopped, command.final, logprobs, choice)
        )

    def _forget_job(self, command: commands.ForgetJob) -> None:
        self._answers.pop(command.job_id, None)
