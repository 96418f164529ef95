"""Clients that leave, do not read, or send nonsense, against a node whose answers the test writes."""

import json
import socket
from typing import Any

import pytest

from common import client_messages as cm
from common.sampling import MAX_CHOICES
from decode_node.gateway.app import BODY_BYTES
from tests.gateway.harness import check_stream, events_of, poke, read_all, request_bytes
from tests.gateway.scripted import Script, accepted, chat_body, finished, served
from tests.process.harness import wait_until

CHAT = "/v1/chat/completions"
TEXT_CHARACTERS = 8_000


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("moment", ["submitted", "accepted", "decoding"])
def test_a_client_that_leaves_has_its_job_cancelled(scripted: Script, moment: str, stream: bool) -> None:
    gateway, node = scripted.gateway, scripted.node
    before = (
        gateway.metric("tandem_gateway_disconnects_total"),
        gateway.metric("tandem_gateway_jobs_cancelled_total"),
    )
    heard = {"submitted": 0, "accepted": 1, "decoding": 2}[moment]
    node.on_submit = lambda submit: [accepted(submit), cm.Tokens(submit.label, (5,), "a")][:heard]
    with gateway.connect() as connection:
        connection.sendall(request_bytes(CHAT, chat_body(stream=stream)))
        node.wait_submitted()
        if stream and heard == 2:
            assert connection.recv(1)
    node.wait_cancelled()
    assert node.cancelled == [node.submitted[0].label]
    gateway.wait_metric("tandem_gateway_disconnects_total", before[0] + 1)
    gateway.wait_metric("tandem_gateway_jobs_cancelled_total", before[1] + 1)
    assert gateway.get("/state").json()["gateway"]["in_flight"] == 0


def test_a_client_that_leaves_amid_its_body_is_a_disconnect_and_no_fault(scripted: Script) -> None:
    gateway = scripted.gateway
    before = gateway.metric("tandem_gateway_disconnects_total")
    with gateway.connect() as connection:
        connection.sendall(request_bytes(CHAT, chat_body())[:-5])
    gateway.wait_metric("tandem_gateway_disconnects_total", before + 1)
    assert gateway.metric('tandem_gateway_errors_total{code="internal"}') == 0
    assert gateway.logged("request.failed") == []
    assert scripted.node.submitted == []


def test_a_job_that_ended_is_not_cancelled_when_its_client_leaves(scripted: Script) -> None:
    assert scripted.chat(stream=True).status_code == 200
    assert scripted.chat().status_code == 200
    poke(scripted.gateway)
    assert scripted.node.cancelled == []


def test_late_messages_of_a_cancelled_job_are_dropped(scripted: Script) -> None:
    node = scripted.node
    node.on_submit = lambda submit: [accepted(submit)]
    node.on_other = lambda message: (
        [cm.Tokens(message.label, (5,), "late"), finished(cm.Submit(message.label))]
        if isinstance(message, cm.CancelJob)
        else []
    )
    with scripted.gateway.connect() as connection:
        connection.sendall(request_bytes(CHAT, chat_body()))
        node.wait_submitted()
    node.wait_cancelled()
    node.on_submit = served
    answer = scripted.chat().json()
    assert answer["choices"][0]["message"]["content"] == "ab"


def _flood(submit: cm.Submit, count: int = 600) -> list[Any]:
    return [cm.Tokens(submit.label, (5,), "x" * TEXT_CHARACTERS)] * count


def test_a_client_that_does_not_read_is_given_up_and_others_are_served(scripted: Script) -> None:
    gateway, node = scripted.gateway, scripted.node
    name = "tandem_gateway_slow_readers_total"
    before, cancelled = gateway.metric(name), gateway.metric("tandem_gateway_jobs_cancelled_total")
    node.on_submit = lambda submit: [accepted(submit), *_flood(submit)]
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connection.settimeout(20)
        connection.connect(gateway.address)
        connection.sendall(request_bytes(CHAT, chat_body(stream=True)))
        node.wait_submitted()
        (slow,) = node.submitted
        node.on_submit = lambda submit: [*served(submit), *_flood(slow)]

        def given_up() -> bool:
            assert check_stream(events_of(scripted.chat(stream=True))) == "ab"
            return slow.label in node.cancelled

        wait_until(given_up, "the slow reader's job is cancelled", [])
        gateway.wait_metric(name, before + 1)
        with pytest.raises(ConnectionResetError):
            read_all(connection)
    assert gateway.metric("tandem_gateway_jobs_cancelled_total") == cancelled + 1
    assert gateway.metric(name) == before + 1
    assert gateway.get("/state").json()["gateway"]["in_flight"] == 0


def test_more_jobs_than_the_queue_holds_are_told_to_come_back(scripted: Script) -> None:
    gateway, node = scripted.gateway, scripted.node
    node.on_submit = lambda submit: [accepted(submit)]
    connections = [gateway.connect() for _ in range(40)]
    for connection in connections:
        connection.sendall(request_bytes(CHAT, chat_body()))
    node.wait_submitted(40)
    assert gateway.metric("tandem_gateway_jobs_in_flight") == 40
    refused = scripted.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "busy")
    assert refused.headers["retry-after"] == "1"
    for connection in connections:
        connection.close()
    node.wait_cancelled(40)
    node.on_submit = served
    assert scripted.chat().status_code == 200


def _raw(scripted: Script, text: bytes, kind: str = "application/json", path: str = CHAT) -> Any:
    return scripted.gateway.raw_post(path, text, kind)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b'{"model": "model", "messages": [{"role": "user", "content": "\\ud800"}]}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
    ids=["empty", "cut", "bytes", "list", "null", "text", "surrogate", "deep"],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
def test_a_body_that_is_no_object_is_refused_in_openais_form(
    scripted: Script, path: str, text: bytes, words: str
) -> None:
    response = _raw(scripted, text, path=path)
    error = response.json()["error"]
    assert response.status_code == 400
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert scripted.node.submitted == []


def test_other_faults_of_http_have_openais_form_too(scripted: Script) -> None:
    gateway = scripted.gateway
    for response, status, code in (
        (_raw(scripted, b"a=b", "application/x-www-form-urlencoded"), 415, "not_json"),
        (_raw(scripted, b" " * (BODY_BYTES + 1)), 413, "body_too_large"),
        (gateway.get("/v1/nothing"), 404, "not_found"),
        (gateway.get(CHAT), 405, "method_not_allowed"),
        (gateway.get("/page/..%2fapp.py"), 404, "not_found"),
        (gateway.get("/page/nothing.js"), 404, "not_found"),
        (gateway.get("/v1/models/other"), 404, "model_not_found"),
        (scripted.chat(model="other"), 404, "model_not_found"),
    ):
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert gateway.get("/v1/models/model").json()["id"] == "model"
    assert scripted.chat().status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({"messages": [{"role": "user", "content": "a", "name": "me"}]}, "messages[0].name"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": MAX_CHOICES + 1}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"store": True}, "store"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"prefill_worker": "tcp://1.2.3.4:5"}, "prefill_worker"),
        ({"label": "mine"}, "label"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_a_field_that_does_not_work_is_refused_by_name(
    scripted: Script, fields: dict[str, Any], param: str | None
) -> None:
    response = scripted.gateway.post(CHAT, {**chat_body(), **fields})
    error = response.json()["error"]
    assert response.status_code == 400
    assert param is None or error["param"] == param
    assert scripted.node.submitted == []


def test_nan_is_no_number(scripted: Script) -> None:
    text = json.dumps(chat_body(temperature=float("nan"))).encode()
    assert _raw(scripted, text).json()["error"]["param"] == "temperature"
