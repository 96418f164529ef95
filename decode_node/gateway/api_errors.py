"""Errors as OpenAI's clients know them.

Decides the HTTP status of every Tandem error code, the `type` of an error object, and when a client is told
to come back later. Raised and shown by everything in the gateway that answers a request. Nothing of a prompt
may get into a message.
"""

import json
from typing import Any

from common.errors import ErrorCode

RETRY_AFTER_S = 1
UNAVAILABLE = "node_unavailable"

STATUS_OF: dict[ErrorCode, int] = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.EMPTY_PROMPT: 400,
    ErrorCode.TOKEN_OUT_OF_RANGE: 400,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: 400,
    ErrorCode.INVALID_SAMPLING: 400,
    ErrorCode.BAD_MESSAGE: 400,
    ErrorCode.BUSY: 429,
    ErrorCode.SHUTTING_DOWN: 503,
    ErrorCode.NO_PREFILL_NODE: 503,
    ErrorCode.DRAINING: 503,
    ErrorCode.DRAIN_TIMEOUT: 503,
    ErrorCode.PEER_LOST: 503,
    ErrorCode.ENGINE_HUNG: 503,
    ErrorCode.CANCELLED: 503,
    ErrorCode.PREFILL_TIMEOUT: 504,
    ErrorCode.JOB_TIMEOUT: 504,
    ErrorCode.DUPLICATE_ID: 500,
    ErrorCode.PREFILL_ERROR: 500,
    ErrorCode.KV_CORRUPT: 500,
    ErrorCode.KV_STALE: 500,
    ErrorCode.ENGINE_ERROR: 500,
    ErrorCode.PROTOCOL_ERROR: 500,
    ErrorCode.SEQUENCE_ERROR: 500,
    ErrorCode.VERSION_MISMATCH: 500,
    ErrorCode.CLIENT_GONE: 500,
}
_RETRIED = frozenset({429, 503})


class ApiError(Exception):
    """A request gets this answer instead of what it asked for.

    param: the field at fault. retry_after_s: None says nothing about coming back.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = RETRY_AFTER_S if retry_after_s is None and status in _RETRIED else retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """The error object, in its envelope."""
        kind = _type_of(self.status)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def encoded(self) -> bytes:
        return json.dumps(self.body, ensure_ascii=False).encode("utf-8", "replace")

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Beside those of any JSON answer."""
        headers = []
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after_s))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request itself is wrong."""
    return ApiError(400, message, code or str(ErrorCode.INVALID_REQUEST).lower(), param=param)


def unavailable(message: str) -> ApiError:
    """There is no session with the decode node."""
    return ApiError(503, message, UNAVAILABLE)


def of_code(code: ErrorCode, detail: str, retry_ms: int | None = None) -> ApiError:
    """What REJECTED or FAILED of the decode node means over HTTP."""
    retry_s = None if retry_ms is None else max(1, -(-retry_ms // 1_000))
    message = f"{detail or code}; what to do: {code.advice}"
    # The decode node names the field at fault first.
    field = detail.split(":")[0] if code is ErrorCode.INVALID_SAMPLING else ""
    param = field if field.isidentifier() else None
    return ApiError(STATUS_OF[code], message, str(code).lower(), param=param, retry_after_s=retry_s)


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    if status == 401:
        return "authentication_error"
    return "invalid_request_error" if status < 500 else "server_error"
