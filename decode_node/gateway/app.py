"""The gateway's routes.

Decides which path does what, and turns bodies into jobs. Built once by the server; everything that waits or
streams is in `answering`, everything that is shared in `service`. A route must never answer in another form
than OpenAI's when it refuses.
"""

import mimetypes
import re
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from common import limits
from common.clock import wall_s
from common.ids import new_incarnation
from common.version import VERSION
from decode_node.gateway import bodies
from decode_node.gateway.answering import Generating
from decode_node.gateway.answers import Head
from decode_node.gateway.api_errors import ApiError
from decode_node.gateway.service import Service

PAGE = Path(__file__).with_name("page")
BODY_BYTES = limits.CONTROL_MESSAGE_BYTES
_DISCARDED_BYTES = 8 * BODY_BYTES  # of a body that is too large, so that its sender hears about it
_UNROUTED = {
    404: ApiError(404, "there is nothing at this path; see /docs", "not_found"),
    405: ApiError(405, "this path has other methods; see /docs", "method_not_allowed"),
}
_PAGE_FILE = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+")


def build(service: Service) -> FastAPI:
    """The application."""
    app = FastAPI(
        title="Tandem", version=VERSION, docs_url="/docs", redoc_url=None, openapi_url="/openapi.json"
    )

    _add_error_handlers(app, service)
    _add_generation(app, service)
    _add_models(app, service)
    _add_tokenizer(app, service)
    _add_operations(app, service)
    _add_page(app, service)
    return app


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    async def on_api_error(request: Request, error: ApiError) -> Response:
        service.metrics.errors.labels(error.code).inc()
        headers = {name.decode(): value.decode() for name, value in error.headers}
        return Response(error.encoded, error.status, headers, "application/json")

    async def on_http_error(request: Request, error: HTTPException) -> Response:
        response = await on_api_error(request, _UNROUTED.get(error.status_code, _UNROUTED[404]))
        response.headers.update(error.headers or {})
        return response

    async def on_disconnect(request: Request, error: ClientDisconnect) -> Response:
        # Amid its body; nobody reads this answer.
        service.metrics.disconnects.inc()
        return Response(status_code=400)

    async def on_fault(request: Request, error: Exception) -> Response:
        return await on_api_error(request, ApiError(500, "the gateway failed on this request", "internal"))

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    app.add_exception_handler(Exception, on_fault)  # it is raised again afterwards, for the log


async def read_body(request: Request, body_class: type) -> Any:
    """The parsed body. Raises `ApiError`."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "send JSON, with the header Content-Type: application/json", "not_json")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size <= BODY_BYTES:
            parts.append(part)
        elif size > _DISCARDED_BYTES:
            break
    if size > BODY_BYTES:
        raise ApiError(413, f"the body has more than {BODY_BYTES} bytes", "body_too_large")
    return bodies.parse(body_class, b"".join(parts))


def _schema(body_class: type) -> dict[str, Any]:
    """How /docs shows a body that the route reads by itself."""
    schema = body_class.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", tags=["generate"], openapi_extra=_schema(bodies.ChatRequest))
    async def chat(request: Request) -> Response:
        body = await read_body(request, bodies.ChatRequest)
        service.check_model(body.model)
        source = {"messages": tuple(message.plain() for message in body.messages)}
        given = body.answer_tokens
        sampling = body.sampling()
        sampling["max_tokens"] = await service.answer_tokens() if given is None else given
        job = {**source, "sampling": sampling, "cache_salt": body.salt}

        async def shorter() -> dict[str, Any]:
            fitting = await service.fitting_tokens(source)
            return {**job, "sampling": {**sampling, "max_tokens": fitting}}

        return _generating(service, body, job, "chatcmpl", retry_job=shorter if given is None else None)

    @app.post("/v1/completions", tags=["generate"], openapi_extra=_schema(bodies.CompletionRequest))
    async def complete(request: Request) -> Response:
        body = await read_body(request, bodies.CompletionRequest)
        service.check_model(body.model)
        source = body.source()
        sampling = body.sampling()
        given = body.answer_tokens
        sampling["max_tokens"] = bodies.COMPLETION_MAX_TOKENS if given is None else given
        job = {**source, "sampling": sampling, "cache_salt": body.salt}
        echo = None
        if body.echo:
            echo = source.get("prompt")
            echo = (await service.hub.tokenize(token_ids=source["prompt_ids"])).text if echo is None else echo
        return _generating(service, body, job, "cmpl", echo=echo)


def _generating(service: Service, body: Any, job: dict[str, Any], prefix: str, **others: Any) -> Response:
    identity = f"{prefix}-{new_incarnation()}"
    created_s = wall_s()
    head = Head(identity, created_s, service.model, chat=prefix == "chatcmpl")
    return Generating(
        service,
        head,
        job,
        choices=body.n or 1,
        stream=bool(body.stream),
        includes_usage=body.includes_usage,
        **others,
    )


def _add_models(app: FastAPI, service: Service) -> None:
    started_s = wall_s()

    def described() -> dict[str, Any]:
        return {"id": service.model, "object": "model", "created": started_s, "owned_by": "tandem"}

    @app.get("/v1/models", tags=["models"])
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [described()]})

    @app.get("/v1/models/{name:path}", tags=["models"])
    async def model(name: str) -> JSONResponse:
        service.check_model(name)
        return JSONResponse(described())


def _add_tokenizer(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", tags=["tokens"], openapi_extra=_schema(bodies.TokenizeRequest))
    async def tokenize(request: Request) -> JSONResponse:
        body = await read_body(request, bodies.TokenizeRequest)
        if body.model is not None:
            service.check_model(body.model)
        if body.prompt is not None:
            source: dict[str, Any] = {"prompt": body.prompt}
        else:
            source = {"messages": tuple(message.plain() for message in body.messages)}
        ids = (await service.hub.tokenize(**source)).token_ids
        limit = (await service.hub.status())["max_tokens"]
        return JSONResponse({"count": len(ids), "max_model_len": limit, "tokens": list(ids)})

    @app.post("/detokenize", tags=["tokens"], openapi_extra=_schema(bodies.DetokenizeRequest))
    async def detokenize(request: Request) -> JSONResponse:
        body = await read_body(request, bodies.DetokenizeRequest)
        if body.model is not None:
            service.check_model(body.model)
        return JSONResponse({"prompt": (await service.hub.tokenize(token_ids=tuple(body.tokens))).text})


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/health/live", tags=["operations"])
    async def live() -> JSONResponse:
        return JSONResponse({"live": True})

    @app.get("/health/ready", tags=["operations"])
    async def ready() -> JSONResponse:
        reason = await service.readiness()
        return JSONResponse({"ready": reason is None, "reason": reason}, 200 if reason is None else 503)

    @app.get("/metrics", tags=["operations"])
    async def metrics() -> Response:
        try:
            status = await service.hub.status()
        except ApiError:
            status = None
        return Response(service.metrics.page(status), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/state", tags=["operations"])
    async def state() -> JSONResponse:
        return JSONResponse(await service.state())


def _add_page(app: FastAPI, service: Service) -> None:
    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return _page_file("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def page(name: str) -> Response:
        return _page_file(name)


def _page_file(name: str) -> Response:
    path = PAGE / name
    if not _PAGE_FILE.fullmatch(name) or not path.is_file():
        raise ApiError(404, "there is no page file of this name; the API is described at /docs", "not_found")
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    headers = {"x-content-type-options": "nosniff", "cache-control": "no-cache"}
    return Response(path.read_bytes(), headers=headers, media_type=kind)
