"""What every request of the gateway shares: the node, the counters, the history, and who may still begin.

Decides whether a job is taken (not while draining, not beyond `--max-queue`), under which name the model is
served, and how many tokens an answer may have when its request does not say. One per process; made by the
server, used by the routes and the responses.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from common.errors import ErrorCode
from common.log import NodeLog
from common.log_events import LogEvent
from decode_node.gateway.api_errors import ApiError, of_code, unavailable
from decode_node.gateway.bodies import CHAT_MAX_TOKENS
from decode_node.gateway.history import History
from decode_node.gateway.hub import Call, Hub
from decode_node.gateway.metrics import Metrics
from transport.key_files import ClientKeys
from transport.peers import AttemptRefused, SessionEnded, SessionOpened

LIMIT_FRESH_MS = 10_000
_LEFT_POLL_S = 0.02


class Service:
    """The gateway without its HTTP."""

    def __init__(
        self,
        endpoint: str,
        keys: ClientKeys | None,
        *,
        served_model_name: str | None,
        max_queue: int,
        keep_alive_ms: int,
        log: NodeLog,
    ) -> None:
        self.metrics = Metrics()
        self.history = History()
        self.hub = Hub(endpoint, keys, keep_alive_ms, self._on_session)
        self.draining = False
        self.abort_connection: Callable[[Any], None] = lambda client: None
        self.log = log
        self._served_model_name = served_model_name
        self._max_queue = max_queue
        self.metrics.in_flight.set_function(lambda: len(self.hub.calls))
        self.metrics.connected.set_function(lambda: self.hub.session is not None)

    @property
    def model(self) -> str:
        """The name that requests must give. Raises `ApiError` while it is not known."""
        if self._served_model_name is not None:
            return self._served_model_name
        if self.hub.hello is None:
            raise unavailable(f"the decode node cannot be reached: {self.hub.problem}")
        return self.hub.hello.profile.model_id

    def check_model(self, name: str) -> None:
        """Raise `ApiError` unless it is the one that is served."""
        if name != self.model:
            message = f"there is no such model here; the one that is served is {self.model}"
            raise ApiError(404, message, "model_not_found", param="model")

    def submit(self, label: str, job: dict[str, Any], on_give_up: Callable[[], None]) -> Call:
        """Send a job. Raises `ApiError`."""
        if self.draining:
            raise of_code(ErrorCode.SHUTTING_DOWN, "the gateway is shutting down")
        if len(self.hub.calls) >= self._max_queue:
            raise of_code(ErrorCode.BUSY, f"{self._max_queue} jobs are under way here, and no more are taken")
        return self.hub.submit(label, job, on_give_up)

    async def answer_tokens(self) -> int:
        """Most tokens of a chat's answer whose request does not say, before the prompt's length is known."""
        return max(1, min(CHAT_MAX_TOKENS, await self._token_limit() - 1))

    async def fitting_tokens(self, source: dict[str, Any]) -> int:
        """The same for a prompt that left too little room."""
        asked = {"token_ids" if name == "prompt_ids" else name: value for name, value in source.items()}
        tokenized = await self.hub.tokenize(**asked)
        return max(1, min(CHAT_MAX_TOKENS, await self._token_limit() - len(tokenized.token_ids)))

    async def _token_limit(self) -> int:
        try:
            status = await self.hub.status(LIMIT_FRESH_MS)
        except ApiError:
            # A node that is slow to tell its limit may still take the job.
            status = self.hub.last_status or {"max_tokens": CHAT_MAX_TOKENS + 1}
        return status["max_tokens"]

    async def readiness(self) -> str | None:
        """Why no job should be sent here now, None when one may."""
        if self.draining:
            return "the gateway is shutting down"
        try:
            status = await self.hub.status()
        except ApiError as error:
            return error.message
        return None if status["ready"] else "the decode node is not ready: see its STATUS"

    async def state(self) -> dict[str, Any]:
        """What GET /state tells."""
        problem, status = None, None
        try:
            status = await self.hub.status()
        except ApiError as error:
            problem = error.message
        return {
            "gateway": {"draining": self.draining, "in_flight": len(self.hub.calls)},
            "decode": status,
            "problem": problem,
            **self.history.described(),
        }

    async def drain(self, drain_ms: int) -> bool:
        """Take no more jobs and wait for those under way; whether all of them ended by themselves."""
        self.draining = True
        try:
            async with asyncio.timeout(drain_ms / 1_000):
                while self.hub.calls:
                    await asyncio.sleep(_LEFT_POLL_S)
        except TimeoutError:
            self.hub.fail_all(ErrorCode.SHUTTING_DOWN, "the gateway is shutting down")
            return False
        return True

    def _on_session(self, item: Any) -> None:
        match item:
            case SessionOpened(hello_ok=hello):
                self.log.info(LogEvent.SESSION_OPENED, peer=self.hub.endpoint, session=hello.session)
            case SessionEnded(session=session, cause=cause):
                self.metrics.sessions_lost.inc()
                self.log.warning(LogEvent.SESSION_ENDED, peer=self.hub.endpoint, session=session, cause=cause)
            case AttemptRefused(refusal=refusal):
                self.log.warning(LogEvent.HELLO_REFUSED, peer=self.hub.endpoint, detail=refusal.detail)
