"""The application in the test's own process, where a fault can be put into it."""

import asyncio
import io
import json

import httpx
import pytest

from common.log import NodeLog
from decode_node.gateway.app import PAGE, build
from decode_node.gateway.guard import Guard
from decode_node.gateway.service import Service


class Place:
    """An application and its log."""

    def __init__(self) -> None:
        self.log = io.StringIO()
        log = NodeLog(node="gateway", incarnation="i", form="json", stream=self.log)
        options = {"served_model_name": "model", "max_queue": 1, "keep_alive_ms": 1_000}
        self.service = Service("ipc:///nowhere", None, **options, log=log)
        self.app = Guard(build(self.service), self.service, ())

    def get(self, path: str) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                return await client.get(path)

        return asyncio.run(ask())


def test_a_fault_of_the_gateway_is_answered_in_openais_form_and_logged_without_its_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place()

    def fail() -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(place.service, "readiness", fail)
    response = place.get("/health/ready")
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal")
    entry = json.loads(place.log.getvalue())
    assert (entry["event"], entry["error"]) == ("request.failed", "RuntimeError")
    assert "test_guard.py:" in entry["at"]
    assert "secret" not in response.text + place.log.getvalue()


def test_the_page_is_served_when_it_is_there_and_missed_in_words_when_not() -> None:
    response = Place().get("/")
    assert response.status_code == (200 if (PAGE / "index.html").is_file() else 404)
    assert "html" in response.text or "/docs" in response.json()["error"]["message"]


def test_the_description_names_every_endpoint_and_its_fields() -> None:
    described = Place().get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/state"} <= set(described["paths"])
    body = described["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert "min_p" in body["schema"]["properties"]
