"""The gateway's end of its decode node: jobs of HTTP requests by label, STATUS and TOKENIZE.

Decides which request gets which message, and when a request's client reads too slowly. Lives on the asyncio
loop; a `ClientThread` owns the socket and hands over batches of messages. A job that its request has let go
of is cancelled at once, whatever became of the request; its late messages are dropped. Nothing here waits for
another request.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from common.client_messages import (
    Accepted,
    CancelJob,
    ClientError,
    Failed,
    Finished,
    Rejected,
    StatusReply,
    StatusRequest,
    Submit,
    Tokenize,
    Tokenized,
    Tokens,
)
from common.clock import now_ms
from common.errors import ErrorCode
from common.ids import new_incarnation
from common.messages import HelloOk
from decode_node.gateway.api_errors import ApiError, bad_request, of_code, unavailable
from transport.client import problem_of
from transport.client_thread import ClientThread
from transport.key_files import ClientKeys
from transport.loop import ThreadDied
from transport.peers import AttemptRefused, Delivered, SessionEnded, SessionOpened

STATUS_FRESH_MS = 250
STATUS_DEADLINE_MS = 1_000
TOKENIZE_DEADLINE_MS = 10_000
TICK_MS = 100
BUFFERED_MESSAGES = 1_024  # of a stream whose client does not read; one more cancels its job
STALLED_MS = 30_000  # a client that takes nothing for so long is given up

_ENDS = (Finished, Failed, Rejected)


class Call:
    """One HTTP request's job, from SUBMIT until the request lets go of it.

    arrived: messages that the request has not taken yet. end: the terminal one, once it is here.
    sending_since_ms: when the request began to wait for its client to read.
    """

    __slots__ = (
        "_waiter",
        "arrived",
        "arrived_ms",
        "end",
        "given_up",
        "job_id",
        "keep_alive_due",
        "label",
        "on_give_up",
        "sending_since_ms",
        "session",
        "waiting_since_ms",
    )

    def __init__(self, label: str, session: str, on_give_up: Callable[[], None]) -> None:
        self.label = label
        self.session = session
        self.on_give_up = on_give_up
        self.arrived: list[Any] = []
        self.arrived_ms = now_ms()
        self.end: Any = None
        self.job_id: str | None = None
        self.given_up = False
        self.keep_alive_due = False
        self.sending_since_ms: int | None = None
        self.waiting_since_ms: int | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[Any]:
        """What has arrived since; waits for something, or for a keep-alive to be due: then nothing."""
        if not self.arrived and not self.keep_alive_due:
            self._waiter = asyncio.get_running_loop().create_future()
            self.waiting_since_ms = now_ms()
            try:
                await self._waiter
            finally:
                self._waiter = self.waiting_since_ms = None
        self.keep_alive_due = False
        arrived, self.arrived = self.arrived, []
        return arrived

    def wake(self) -> None:
        """End the wait of `take`."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Hub:
    """The session with one decode node and all requests that use it."""

    def __init__(
        self, endpoint: str, keys: ClientKeys | None, keep_alive_ms: int, on_session: Callable[[Any], None]
    ) -> None:
        """on_session: told of SessionOpened, SessionEnded and AttemptRefused."""
        self.endpoint = endpoint
        self.session: str | None = None
        self.hello: HelloOk | None = None
        self.problem = f"nobody has answered at {endpoint} yet"
        self.calls: dict[str, Call] = {}
        self.died: asyncio.Future[str] | None = None
        self._keys = keys
        self._keep_alive_ms = keep_alive_ms
        self._on_session = on_session
        self._thread: ClientThread | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._status: dict[str, Any] | None = None
        self._status_ms: int | None = None
        self._status_waiter: asyncio.Future[dict[str, Any]] | None = None
        self._tokenizing: dict[str, asyncio.Future[Any]] = {}
        self._handlers = {
            StatusReply: self._on_status,
            Tokenized: self._on_tokenized,
            ClientError: self._on_client_error,
        }

    def start(self) -> None:
        """Begin to connect; on the running loop."""
        loop = asyncio.get_running_loop()
        self.died = loop.create_future()

        def deliver(items: list[Any]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._on_items, items)

        self._thread = ClientThread(self.endpoint, deliver, self._keys)
        self._thread.start()
        self._ticker = loop.create_task(self._tick())

    async def stop(self) -> None:
        """Say goodbye to the node, which cancels what still runs."""
        thread, self._thread, self.session = self._thread, None, None
        self._ticker.cancel()
        await asyncio.to_thread(thread.stop)

    def submit(self, label: str, job: dict[str, Any], on_give_up: Callable[[], None]) -> Call:
        """Send a job, whose fields are those of SUBMIT. Raises `ApiError`."""
        if self.session is None:
            raise unavailable(f"the decode node cannot be reached: {self.problem}")
        message = Submit(label, **job)
        problem = problem_of(message)
        if problem is not None:
            raise bad_request(problem)
        call = self.calls[label] = Call(label, self.session, on_give_up)
        self._thread.post(call.session, message)
        return call

    def let_go(self, call: Call) -> bool:
        """The request no longer wants its job; whether it had to be cancelled. May be called twice."""
        if self.calls.pop(call.label, None) is None or call.end is not None:
            return False
        if call.session == self.session:
            self._thread.post(call.session, CancelJob(call.label))
        return True

    def fail_all(self, code: ErrorCode, detail: str) -> None:
        """Give every request that still runs this answer; its job is cancelled when it has heard."""
        for call in list(self.calls.values()):
            if call.end is None and not call.given_up:
                call.arrived.append(Failed(call.label, code, detail, code.definite))
                call.wake()

    async def status(self, fresh_ms: int = STATUS_FRESH_MS) -> dict[str, Any]:
        """The node's STATUS, not older than `fresh_ms`. Raises `ApiError` when it does not come in time."""
        if self.session is None:
            raise unavailable(f"the decode node cannot be reached: {self.problem}")
        if self._status is not None and now_ms() - self._status_ms < fresh_ms:
            return self._status
        if self._status_waiter is None:
            # One at a time: a node that hangs must not find a heap of them when it goes on.
            self._status_waiter = asyncio.get_running_loop().create_future()
            self._thread.post(self.session, StatusRequest())
        try:
            async with asyncio.timeout(STATUS_DEADLINE_MS / 1_000):
                return await asyncio.shield(self._status_waiter)
        except TimeoutError:
            raise unavailable(f"the decode node did not answer within {STATUS_DEADLINE_MS} ms") from None

    @property
    def last_status(self) -> dict[str, Any] | None:
        """The newest STATUS of this session, however old."""
        return self._status

    async def tokenize(self, **source: Any) -> Tokenized:
        """Ask for ids of a text or chat, or for the text of ids. Raises `ApiError`."""
        if self.session is None:
            raise unavailable(f"the decode node cannot be reached: {self.problem}")
        message = Tokenize(f"tokenize-{new_incarnation()}", **source)
        problem = problem_of(message)
        if problem is not None:
            raise bad_request(problem)
        waiter = self._tokenizing[message.label] = asyncio.get_running_loop().create_future()
        self._thread.post(self.session, message)
        try:
            async with asyncio.timeout(TOKENIZE_DEADLINE_MS / 1_000):
                return await waiter
        except TimeoutError:
            detail = f"the decode node did not tokenize within {TOKENIZE_DEADLINE_MS} ms"
            raise ApiError(504, detail, str(ErrorCode.JOB_TIMEOUT).lower()) from None
        finally:
            self._tokenizing.pop(message.label, None)

    def _on_items(self, items: list[Any]) -> None:
        for item in items:
            if type(item) is Delivered:
                if item.session == self.session:
                    self._on_message(item.message)
                continue
            match item:
                case SessionOpened(hello_ok=hello):
                    self.session, self.hello = hello.session, hello
                    self._status = None
                case SessionEnded(cause=cause):
                    self._lose(f"the session with the decode node ended: {cause}")
                case AttemptRefused(refusal=refusal):
                    self.problem = f"it refused: {refusal.detail}"
                case ThreadDied():
                    self._lose("the gateway's own thread died")
                    self.died.set_result(str(item))
            if not isinstance(item, ThreadDied):
                self._on_session(item)

    def _on_message(self, message: Any) -> None:
        call = self.calls.get(getattr(message, "label", None))
        if call is not None:
            self._on_job_message(call, message)
        elif isinstance(message, Rejected) and message.label in self._tokenizing:
            error = of_code(message.code, message.detail, message.retry_ms)
            _answer(self._tokenizing[message.label], error)
        elif type(message) in self._handlers:
            self._handlers[type(message)](message)

    def _on_job_message(self, call: Call, message: Any) -> None:
        if isinstance(message, Tokens):
            if len(call.arrived) >= BUFFERED_MESSAGES:
                self._give_up(call)
                return
        elif isinstance(message, Accepted):
            call.job_id = message.job_id
        elif isinstance(message, _ENDS):
            call.end = message
        call.arrived.append(message)
        call.wake()

    def _give_up(self, call: Call) -> None:
        """The client does not read: its job ends now, and its connection."""
        if not call.given_up:
            call.given_up = True
            self.let_go(call)
            call.arrived.clear()
            call.on_give_up()
            call.wake()

    def _on_status(self, message: StatusReply) -> None:
        self._status, self._status_ms = message.body, now_ms()
        waiter, self._status_waiter = self._status_waiter, None
        if waiter is not None:
            _answer(waiter, self._status)

    def _on_tokenized(self, message: Tokenized) -> None:
        if message.label in self._tokenizing:
            _answer(self._tokenizing[message.label], message)

    def _on_client_error(self, message: ClientError) -> None:
        # All that is sent was checked, so this node is of another kind: it answers no job.
        self._fail_calls(message.code, f"the decode node does not understand: {message.detail}")

    def _lose(self, problem: str) -> None:
        self.session = self.hello = self._status = None
        self.problem = problem
        self._fail_calls(ErrorCode.PEER_LOST, problem)

    def _fail_calls(self, code: ErrorCode, detail: str) -> None:
        for call in list(self.calls.values()):
            if call.end is None:
                self._on_job_message(call, Failed(call.label, code, detail, code.definite))
        waiters = [*self._tokenizing.values(), self._status_waiter]
        self._status_waiter = None
        for waiter in waiters:
            if waiter is not None:
                _answer(waiter, of_code(code, detail))

    async def _tick(self) -> None:
        """Look after those who wait: for tokens, or for their client to read."""
        while True:
            await asyncio.sleep(TICK_MS / 1_000)
            moment_ms = now_ms()
            for call in list(self.calls.values()):
                waiting_ms, sending_ms = call.waiting_since_ms, call.sending_since_ms
                if waiting_ms is not None and moment_ms - waiting_ms >= self._keep_alive_ms:
                    call.keep_alive_due = True
                    call.wake()
                if sending_ms is not None and moment_ms - sending_ms >= STALLED_MS:
                    self._give_up(call)


def _answer(waiter: asyncio.Future[Any], answer: Any) -> None:
    """Answer whoever waits, if anybody still does."""
    if waiter.done():
        return
    if isinstance(answer, ApiError):
        waiter.set_exception(answer)
        waiter.exception()  # nobody may be there to look at it
    else:
        waiter.set_result(answer)
