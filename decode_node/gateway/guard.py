"""What every request passes before and after its route: keys, counting, and what nobody expected.

Decides who gets in, and that even a fault of the gateway itself is answered in OpenAI's form. Keys are
compared in constant time; neither a key nor a body is ever logged. Wraps the application as plain ASGI, so
that a streamed chunk costs nothing here.
"""

import hmac
import traceback
from collections.abc import Sequence
from typing import Any

from common.log_events import LogEvent
from decode_node.gateway.answering import SERVER_SEND
from decode_node.gateway.api_errors import ApiError
from decode_node.gateway.api_keys import digest_of
from decode_node.gateway.service import Service

_ROUTES = frozenset(
    {
        "/",
        "/docs",
        "/openapi.json",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health/live",
        "/health/ready",
        "/metrics",
        "/state",
    }
)
_OPEN = frozenset({"/", "/docs", "/openapi.json", "/health/live", "/health/ready"})
_OPEN_PREFIX = "/page/"


class Guard:
    """The outermost application."""

    def __init__(self, app: Any, service: Service, keys: Sequence[bytes]) -> None:
        """keys: digests of those that let in; none lets everybody in."""
        self._app = app
        self._service = service
        self._keys = keys

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[SERVER_SEND] = send

        async def watched(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._count(scope["path"], message["status"])
            await send(message)

        if not self._admits(scope):
            await self._refuse(watched)
            return
        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            # It is answered already. Its words may quote what a client sent, its place cannot.
            place = traceback.extract_tb(error.__traceback__)[-1]
            self._service.log.error(
                LogEvent.REQUEST_FAILED, error=type(error).__name__, at=f"{place.filename}:{place.lineno}"
            )

    def _admits(self, scope: dict[str, Any]) -> bool:
        path = scope["path"]
        if not self._keys or path in _OPEN or path.startswith(_OPEN_PREFIX):
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        digest = digest_of(key.strip())
        # All of them, so that the time does not tell which one came close.
        matches = [hmac.compare_digest(digest, known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(matches)

    async def _refuse(self, send: Any) -> None:
        error = ApiError(401, "give a valid API key: Authorization: Bearer KEY", "invalid_api_key")
        self._service.metrics.errors.labels(error.code).inc()
        size = (b"content-length", b"%d" % len(error.encoded))
        headers = [(b"content-type", b"application/json"), size, *error.headers]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": error.encoded})

    def _count(self, path: str, status: int) -> None:
        route = path if path in _ROUTES else "other"
        self._service.metrics.requests.labels(route, str(status)).inc()
