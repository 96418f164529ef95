"""The response of a request that generates: from SUBMIT to its last byte.

Decides when a status can still be told, what becomes of a job whose client has left or does not read, and how
tokens become chunks. One object is one request; whatever happens to it, its job is let go of. Tokens that
arrived together leave together.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import Response

from common.client_messages import Accepted, Failed, Finished, Rejected, TokenLogprob, Tokens
from common.clock import now_ms
from common.errors import ErrorCode
from decode_node.gateway import answers
from decode_node.gateway.api_errors import ApiError, of_code
from decode_node.gateway.history import JobRecord
from decode_node.gateway.hub import Call
from decode_node.gateway.service import Service

SERVER_SEND = "tandem.server_send"
"""Key of the scope: the server's own `send`; each layer above it would cost every chunk a coroutine."""

Send = Callable[[dict[str, Any]], Awaitable[None]]

_JSON = (b"content-type", b"application/json")
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class _Left(Exception):
    """The client has closed its connection, or was given up; nobody is there to be told."""


class Generating(Response):
    """Runs one job and answers its request. An ASGI application of its own, as responses are."""

    def __init__(
        self,
        service: Service,
        head: answers.Head,
        job: dict[str, Any],
        *,
        choices: int,
        stream: bool,
        includes_usage: bool,
        echo: str | None = None,
        retry_job: Callable[[], Awaitable[dict[str, Any]]] | None = None,
    ) -> None:
        """job: fields of SUBMIT. echo: text that each choice begins with.

        retry_job: the job to send instead when the first one does not fit the context.
        """
        super().__init__()
        self._service = service
        self._head = head
        self._job = job
        self._choices = choices
        self._stream = stream
        self._includes_usage = includes_usage
        self._echo = echo
        self._retry_job = retry_job
        self._chunks: answers.Chunks | None = None
        self._call: Call | None = None
        self._record: JobRecord | None = None
        self._outcome: Finished | None = None
        self._error: str | None = None
        self._left = False
        self._started = False
        self._failure: Failed | Rejected | None = None
        self._token_count = 0
        self._tokens_ms = 0
        self._token_ms: int | None = None
        self._arrived_ms = now_ms()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        self._client = scope.get("client")
        self._server_send = scope.get(SERVER_SEND)
        try:
            await self._answer(send)
        except _Left:
            self._error = self._error or str(ErrorCode.CLIENT_GONE).lower()
        except ApiError as error:
            self._error = error.code
            await self._tell(error, send)
        finally:
            watcher.cancel()
            self._close()

    async def _watch(self, receive: Any) -> None:
        """Learn that the client has left, whatever else goes on."""
        while (await receive())["type"] != "http.disconnect":
            continue
        self._left = True
        if self._outcome is None and self._error is None:
            self._service.metrics.disconnects.inc()
        if self._call is not None:
            # At once: the task that answers may wait for something else.
            self._cancel()
            self._call.wake()

    def _cancel(self) -> None:
        if self._service.hub.let_go(self._call):
            self._service.metrics.cancelled.inc()

    def _close(self) -> None:
        if self._call is not None:
            self._cancel()
        if self._record is not None:
            self._account()
            if self._outcome is not None:
                self._service.metrics.observe_end(self._outcome)
            self._service.history.end(self._record, self._outcome, self._error)

    def _give_up(self) -> None:
        """The client takes nothing: end its connection, which nothing else would."""
        self._error = "slow_reader"
        self._left = True
        self._service.metrics.slow_readers.inc()
        self._service.metrics.cancelled.inc()
        self._service.abort_connection(self._client)

    def _submit(self) -> None:
        service = self._service
        label = self._head.identity
        self._call = service.submit(label, self._job, self._give_up)
        self._call.arrived_ms = self._arrived_ms
        # What a first token would otherwise wait for.
        self._chunks = answers.Chunks(self._head, self._includes_usage)
        self._record = service.history.begin(label, self._arrived_ms, self._stream)

    async def _answer(self, send: Send) -> None:
        self._submit()
        first = await self._first()
        if self._stream:
            await self._answer_in_chunks(first, send)
        else:
            await self._answer_whole(first, send)

    async def _first(self) -> list[Any]:
        """What comes first; empty when a keep-alive is due first. Raises `ApiError`."""
        while True:
            arrived = await self._take()
            if not arrived and self._stream:
                return []
            rest = [message for message in arrived if not isinstance(message, Accepted)]
            if rest and rest[0] is self._failure:
                if not self._may_retry(self._failure):
                    raise _error_of(self._failure)
                await self._submit_again()
            elif rest:
                return rest

    def _may_retry(self, failure: Rejected | Failed) -> bool:
        # A job that was accepted has been taken as fitting.
        too_long = isinstance(failure, Rejected) and failure.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
        return too_long and self._retry_job is not None

    async def _submit_again(self) -> None:
        make_job, self._retry_job, self._failure = self._retry_job, None, None
        self._service.hub.let_go(self._call)
        self._job = await make_job()
        self._service.history.running.pop(self._head.identity, None)
        if self._left:
            raise _Left
        self._submit()

    async def _take(self) -> list[Any]:
        """The next messages; empty when a keep-alive is due."""
        if self._left:
            raise _Left
        self._account()
        arrived = await self._call.take()
        if self._left:
            raise _Left
        for message in arrived:
            if isinstance(message, Tokens):
                self._token_count += len(message.token_ids)
            elif isinstance(message, Finished):
                self._finish(message)
            elif isinstance(message, Failed | Rejected):
                self._failure = message
        if self._token_count:
            self._tokens_ms = now_ms()
        self._record.job_id = self._call.job_id
        return arrived

    def _finish(self, end: Finished) -> None:
        """The job is done; a choice that nothing was heard of is an error, its end is not made up."""
        if self._choices > 1 and len(end.reasons) != self._choices:
            detail = f"the decode node told the end of {len(end.reasons) or 1} of {self._choices} choices"
            self._failure = Failed(end.label, ErrorCode.PROTOCOL_ERROR, detail, False)
        else:
            self._outcome = end

    def _account(self) -> None:
        """Count the tokens taken last; after they were sent, so that nobody waits for it."""
        if self._token_count:
            self._count(self._token_count, self._tokens_ms)
            self._token_count = 0

    def _count(self, count: int, moment_ms: int) -> None:
        metrics = self._service.metrics
        if self._token_ms is None:
            self._record.first_token_ms = moment_ms
            metrics.first_token.observe((moment_ms - self._arrived_ms) / 1_000)
        else:
            metrics.gap.observe((moment_ms - self._token_ms) / 1_000)
        self._token_ms = moment_ms
        self._service.history.count_tokens(count, moment_ms)

    async def _answer_whole(self, arrived: list[Any], send: Send) -> None:
        texts: list[list[str]] = [[self._echo or ""] for _ in range(self._choices)]
        told: list[list[TokenLogprob]] = [[] for _ in range(self._choices)]
        while True:
            for message in arrived:
                if isinstance(message, Tokens):
                    texts[message.choice].append(message.text)
                    told[message.choice] += message.logprobs
            if self._failure is not None:
                raise _error_of(self._failure)
            if self._outcome is not None:
                break
            arrived = await self._take()
        shape = answers.chat_logprobs if self._head.chat else lambda tokens: answers.text_logprobs(tokens, 0)
        wants = self._job["sampling"].get("logprobs") is not None
        logprobs = [shape(tokens) if wants else None for tokens in told]
        value = answers.whole(self._head, ["".join(parts) for parts in texts], logprobs, self._outcome)
        headers = [(b"x-tandem-path", self._outcome.path.encode())]
        headers.append((b"x-tandem-timings", json.dumps(value["tandem"]["timings"]).encode()))
        await self._send_whole(200, json.dumps(value, ensure_ascii=False).encode(), headers, send)

    async def _send_whole(self, status: int, body: bytes, headers: list[Any], send: Send) -> None:
        self._started = True
        headers = [_JSON, (b"content-length", b"%d" % len(body)), *headers]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await self._write(send, body, more_body=False)

    async def _answer_in_chunks(self, arrived: list[Any], send: Send) -> None:
        chunks = self._chunks
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        send = self._server_send or send
        begin = b""
        if self._head.chat:
            begin = b"".join(chunks.role(choice) for choice in range(self._choices))
        elif self._echo:
            begin = b"".join(chunks.text(choice, self._echo) for choice in range(self._choices))
        while True:
            body = begin + (self._encode(chunks, arrived) if arrived else answers.KEEP_ALIVE)
            begin = b""
            if self._outcome is not None:
                await self._write(send, body + self._tail(chunks, self._outcome), more_body=False)
                return
            if body:
                await self._write(send, body)
            if self._failure is not None:
                raise _error_of(self._failure)
            arrived = await self._take()

    def _encode(self, chunks: answers.Chunks, arrived: list[Any]) -> bytes:
        """Chunks of what has arrived; what follows each other in one choice is one chunk."""
        parts: list[bytes] = []
        choice, text = 0, ""
        for message in arrived:
            if isinstance(message, Tokens):
                if message.logprobs or message.choice != choice:
                    parts += [chunks.text(choice, text)] if text else []
                    choice, text = message.choice, ""
                if message.logprobs:
                    parts.append(chunks.text_with_logprobs(choice, message.text, message.logprobs))
                else:
                    text += message.text
        parts += [chunks.text(choice, text)] if text else []
        return b"".join(parts)

    def _tail(self, chunks: answers.Chunks, end: Finished) -> bytes:
        reasons = answers.reasons_of(end)
        parts = [chunks.finish(choice, reason) for choice, reason in enumerate(reasons[:-1])]
        # Where no chunk with the usage follows, the last one tells how it went.
        added = {} if self._includes_usage else {"tandem": answers.tandem_of(end)}
        parts.append(chunks.finish(self._choices - 1, reasons[-1], **added))
        if self._includes_usage:
            parts.append(chunks.usage(end))
        return b"".join((*parts, answers.DONE))

    async def _write(self, send: Send, body: bytes, more_body: bool = True) -> None:
        self._call.sending_since_ms = now_ms()
        await send({"type": "http.response.body", "body": body, "more_body": more_body})
        self._call.sending_since_ms = None

    async def _tell(self, error: ApiError, send: Send) -> None:
        """Answer with an error: as a status while that can be, else as the last event of the stream."""
        self._service.metrics.errors.labels(error.code).inc()
        if self._left:
            return
        if self._started:
            body = b"data: " + error.encoded + b"\n\n" + answers.DONE
            await send({"type": "http.response.body", "body": body, "more_body": False})
        else:
            await self._send_whole_error(error, send)

    async def _send_whole_error(self, error: ApiError, send: Send) -> None:
        body = error.encoded
        headers = [_JSON, (b"content-length", b"%d" % len(body)), *error.headers]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _error_of(answer: Failed | Rejected) -> ApiError:
    return of_code(answer.code, answer.detail, getattr(answer, "retry_ms", None))
