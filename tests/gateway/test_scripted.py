"""A gateway against a node whose answers the test writes: errors, choices, logprobs, readiness, retries."""

import json
from typing import Any

import pytest

from common import client_messages as cm
from common.clock import now_ms
from common.errors import ErrorCode
from decode_node.gateway.api_errors import STATUS_OF
from tests.gateway.harness import check_stream, events_of, poke, request_bytes
from tests.gateway.scripted import STATUS, Script, accepted, chat_body, finished, served
from tests.process.harness import wait_until


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", ["rejected", "failed"])
def test_every_error_code_is_a_status_before_the_first_token(script_kind: Any, stream: bool) -> None:
    scripted, answers = script_kind
    for code in ErrorCode:
        scripted.node.on_submit = lambda submit, code=code: answers(submit, code)
        response = scripted.chat(stream=stream, max_tokens=3)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (STATUS_OF[code], code.lower())
        assert "in these words" in error["message"]
        assert ("retry-after" in response.headers) == (response.status_code in (429, 503))
        assert response.headers["content-type"] == "application/json"


@pytest.fixture
def script_kind(scripted: Script, kind: str) -> Any:
    def rejected(submit: cm.Submit, code: ErrorCode) -> list[Any]:
        return [cm.Rejected(submit.label, code, "in these words")]

    def failed(submit: cm.Submit, code: ErrorCode) -> list[Any]:
        return [accepted(submit), cm.Failed(submit.label, code, "in these words", code.definite)]

    return scripted, rejected if kind == "rejected" else failed


def test_a_busy_node_says_when_to_come_back_and_it_is_counted(scripted: Script) -> None:
    name = 'tandem_gateway_errors_total{code="busy"}'
    before = scripted.gateway.metric(name)
    scripted.node.on_submit = lambda submit: [cm.Rejected(submit.label, ErrorCode.BUSY, "full", 2_500)]
    response = scripted.chat()
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert scripted.gateway.metric(name) == before + 1


def test_a_wrong_sampling_field_is_named(scripted: Script) -> None:
    detail = "min_p: must be at most 1"
    scripted.node.on_submit = lambda submit: [cm.Rejected(submit.label, ErrorCode.INVALID_SAMPLING, detail)]
    error = scripted.chat(min_p=2).json()["error"]
    assert (error["param"], error["type"]) == ("min_p", "invalid_request_error")


def test_a_failure_amid_a_stream_is_its_last_event_after_all_tokens(scripted: Script) -> None:
    def fails(submit: cm.Submit) -> list[Any]:
        failure = cm.Failed(submit.label, ErrorCode.PEER_LOST, "the worker died", False)
        return [
            accepted(submit),
            cm.Tokens(submit.label, (5,), "a"),
            cm.Tokens(submit.label, (6,), "b"),
            failure,
        ]

    scripted.node.on_submit = fails
    events = events_of(scripted.chat(stream=True))
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == "peer_lost"
    assert "".join(event["choices"][0]["delta"]["content"] for event in events[:-2]) == "ab"
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-2])
    whole = scripted.chat()
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "peer_lost")


def _two_choices(submit: cm.Submit) -> list[Any]:
    pieces = [(0, "a"), (0, "b"), (1, "x"), (0, "c"), (1, "y")]
    tokens = [cm.Tokens(submit.label, (5,), text, choice) for choice, text in pieces]
    return [accepted(submit), *tokens, finished(submit, reasons=("stop", "length"))]


@pytest.mark.parametrize("usage", [False, True], ids=["plain", "usage"])
def test_choices_are_told_apart_in_a_stream(scripted: Script, usage: bool) -> None:
    scripted.node.on_submit = _two_choices
    options = {"stream_options": {"include_usage": True}} if usage else {}
    events = events_of(scripted.chat(n=2, stream=True, **options))
    assert check_stream(events, choices=2, usage=usage) == "abc"
    parts = [event["choices"][0] for event in events[:-1] if event["choices"]]
    text = "".join(part["delta"].get("content", "") for part in parts if part["index"] == 1)
    assert text == "xy"
    assert [part["finish_reason"] for part in parts[-2:]] == ["stop", "length"]
    assert events[-2]["tandem"]["path"] == "remote"


def test_choices_are_told_apart_in_a_whole_answer(scripted: Script) -> None:
    scripted.node.on_submit = _two_choices
    choices = scripted.complete(n=2).json()["choices"]
    told = [(choice["index"], choice["text"], choice["finish_reason"]) for choice in choices]
    assert told == [(0, "abc", "stop"), (1, "xy", "length")]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_end_of_a_choice_is_not_made_up(scripted: Script, stream: bool) -> None:
    scripted.node.on_submit = served
    response = scripted.chat(n=2, stream=stream)
    errors = [event for event in events_of(response) if "error" in event] if stream else [response.json()]
    assert [one["error"]["code"] for one in errors] == ["protocol_error"]
    assert "1 of 2 choices" in errors[0]["error"]["message"]


def test_usage_is_the_nodes_and_the_same_in_both_modes(scripted: Script) -> None:
    whole = scripted.chat().json()
    streamed = events_of(scripted.chat(stream=True, stream_options={"include_usage": True}))[-2]
    expected = {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert whole["usage"] == streamed["usage"] == expected
    assert whole["tandem"] == streamed["tandem"]
    assert whole["tandem"]["cached_tokens_decode"] == 1
    assert whole["tandem"]["cached_tokens_prefill"] == 2
    assert whole["tandem"]["timings"]["stages_ms"] == {"queued": 2, "decoding": 7}


def _with_logprobs(submit: cm.Submit) -> list[Any]:
    told = [
        cm.TokenLogprob(5, "a", -0.5, (cm.TopLogprob(5, "a", -0.5), cm.TopLogprob(6, "é", -1.5))),
        cm.TokenLogprob(6, "\ufffd", -2.0, (cm.TopLogprob(5, "a", -0.1),)),
    ]
    tokens = [cm.Tokens(submit.label, (one.token_id,), one.text, 0, (one,)) for one in told]
    return [accepted(submit), *tokens, finished(submit)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_logprobs_of_a_chat_have_openais_form(scripted: Script, stream: bool) -> None:
    scripted.node.on_submit = _with_logprobs
    response = scripted.chat(logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        events = events_of(response)
        check_stream(events)
        told = [event["choices"][0]["logprobs"] for event in events[:-1]]
        content = [token for one in told if one for token in one["content"]]
    else:
        content = response.json()["choices"][0]["logprobs"]["content"]
    assert [(token["token"], token["logprob"], token["bytes"]) for token in content] == [
        ("a", -0.5, [97]),
        ("\ufffd", -2.0, None),
    ]
    assert content[0]["top_logprobs"][1] == {"token": "é", "logprob": -1.5, "bytes": [195, 169]}
    assert scripted.node.submitted[-1].sampling["logprobs"] == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_logprobs_of_a_completion_have_openais_form(scripted: Script, stream: bool) -> None:
    scripted.node.on_submit = _with_logprobs
    response = scripted.complete(logprobs=1, stream=stream)
    if stream:
        parts = [event["choices"][0]["logprobs"] for event in events_of(response)[:-1]]
        told = {name: [item for part in parts if part for item in part[name]] for name in parts[0]}
    else:
        told = response.json()["choices"][0]["logprobs"]
    assert told["tokens"] == ["a", "\ufffd"]
    assert told["token_logprobs"] == [-0.5, -2.0]
    assert told["top_logprobs"][0] == {"a": -0.5, "é": -1.5}
    assert told["text_offset"] == [0, 1]


def test_a_silent_stream_gets_comments_until_its_first_token(scripted: Script) -> None:
    held: list[cm.Submit] = []

    def hold(submit: cm.Submit) -> list[Any]:
        held.append(submit)
        return [accepted(submit)]

    def release(message: Any) -> list[Any]:
        return [cm.Tokens(held[0].label, (5,), "a"), finished(held[0])]

    scripted.node.on_submit = hold
    scripted.node.on_other = release
    comments, events = 0, []
    # An answer that is silent for longer than this would not survive.
    with scripted.gateway.stream(chat_body(stream=True), timeout=1.0) as response:
        assert response.headers["x-accel-buffering"] == "no"
        for line in response.iter_lines():
            if line.startswith(": "):
                comments += 1
                if comments == 3:
                    poke(scripted.gateway)
            elif line.startswith("data: "):
                events.append(line.removeprefix("data: "))
    assert comments >= 3
    assert check_stream([event if event == "[DONE]" else json.loads(event) for event in events]) == "a"


def test_a_job_that_leaves_too_little_room_by_default_is_sent_again_with_what_fits(scripted: Script) -> None:
    def submit(message: cm.Submit) -> list[Any]:
        if message.sampling["max_tokens"] > 40:
            return [cm.Rejected(message.label, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long")]
        return [accepted(message), cm.Tokens(message.label, (5,), "a"), finished(message)]

    def other(message: Any) -> list[Any]:
        return [cm.Tokenized(message.label, tuple(range(60)), "")] if isinstance(message, cm.Tokenize) else []

    scripted.node.on_submit, scripted.node.on_other = submit, other
    assert scripted.chat().json()["choices"][0]["message"]["content"] == "a"
    assert [one.sampling["max_tokens"] for one in scripted.node.submitted] == [99, 40]
    response = scripted.chat(max_tokens=50)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_readiness_follows_the_nodes_own_word(scripted: Script) -> None:
    gateway, node = scripted.gateway, scripted.node
    node.status = {**STATUS, "ready": False}
    wait_until(lambda: gateway.get("/health/ready").status_code == 503, "unready", [])
    assert gateway.get("/health/live").status_code == 200
    node.status = STATUS
    wait_until(lambda: gateway.get("/health/ready").status_code == 200, "ready again", [])


def test_a_node_that_does_not_answer_status_makes_one_unready_in_time_and_is_asked_once(
    scripted: Script,
) -> None:
    scripted.node.status = None
    wait_until(lambda: scripted.gateway.get("/health/ready").status_code == 503, "unready", [])
    asked = sum(isinstance(message, cm.StatusRequest) for message in scripted.node.received)
    started_ms = now_ms()
    response = scripted.gateway.get("/health/ready")
    assert now_ms() - started_ms < 3_000
    assert "within 1000 ms" in response.json()["reason"]
    assert sum(isinstance(message, cm.StatusRequest) for message in scripted.node.received) == asked


def test_a_lost_session_fails_its_jobs_is_counted_and_comes_back(scripted: Script) -> None:
    lost = scripted.gateway.metric("tandem_gateway_sessions_lost_total")
    scripted.node.on_submit = lambda submit: [accepted(submit), cm.Tokens(submit.label, (5,), "a")]
    with scripted.gateway.stream(chat_body(stream=True)) as response:
        lines = response.iter_lines()
        while '"a"' not in next(lines):
            continue
        scripted.node.farewell.set()
        rest = list(lines)
    assert '"code": "peer_lost"' in rest[-4]
    assert rest[-2] == "data: [DONE]"
    scripted.node.farewell.clear()
    scripted.gateway.wait_connected()
    assert scripted.gateway.metric("tandem_gateway_sessions_lost_total") > lost


def test_a_marker_in_a_prompt_is_in_no_log_metric_or_state(scripted: Script) -> None:
    marker = "XyzzyMarker"
    messages = [{"role": "user", "content": marker}]
    scripted.gateway.post("/v1/chat/completions", {"model": "model", "messages": messages})
    scripted.gateway.post("/v1/chat/completions", {"model": "model", "messages": messages, "top_p": marker})
    scripted.gateway.post("/v1/chat/completions", {"model": marker, "messages": messages})
    shown = scripted.gateway.get("/state").text + scripted.gateway.get("/metrics").text
    assert marker not in shown
    assert marker not in json.dumps(scripted.gateway.entries) + "".join(scripted.gateway.complaints)


def test_state_tells_running_and_ended_jobs_with_their_timings(scripted: Script) -> None:
    scripted.chat()
    scripted.node.on_submit = lambda submit: [accepted(submit)]
    with scripted.gateway.connect() as connection:
        connection.sendall(request_bytes("/v1/chat/completions", chat_body()))
        scripted.node.wait_submitted(2)
        label = scripted.node.submitted[-1].label
        state = scripted.gateway.get("/state").json()
        assert [job["label"] for job in state["running"]] == [label]
        assert state["running"][0]["arrived_ms"] <= state["now_ms"]
        done = state["ended"][-1]
        assert (done["label"], done["path"]) == (scripted.node.submitted[0].label, "remote")
        assert done["timings"]["stages_ms"] == {"queued": 2, "decoding": 7}
        assert done["finish_reasons"] == ["stop"]
        assert done["job_id"] == "job"
        assert state["decode"]["jobs"] == {"queued": 2}
    scripted.node.wait_cancelled()
    wait_until(lambda: scripted.gateway.get("/state").json()["running"] == [], "nothing runs", [])
    assert scripted.gateway.get("/state").json()["ended"][-1]["error"] == "client_gone"


def test_the_nodes_status_is_in_the_metrics(scripted: Script) -> None:
    scripted.gateway.wait_connected()
    page = scripted.gateway.get("/metrics").text
    for line in (
        "tandem_decode_up 1.0",
        'tandem_decode_jobs{state="queued"} 2.0',
        'tandem_decode_lanes{state="free"} 1.0',
        'tandem_decode_slots{state="orphaned",worker="ipc://w"} 1.0',
        'tandem_decode_orphans{worker="ipc://w"} 3.0',
        "tandem_decode_prefetch_depth 1.0",
        "tandem_decode_jobs_accepted_total 5.0",
        'tandem_decode_worker_sessions_total{worker="ipc://w"} 1.0',
        "tandem_decode_prefix_cache_blocks 7.0",
    ):
        assert line in page.splitlines()


def test_stages_and_tokens_of_finished_jobs_are_in_the_metrics(scripted: Script) -> None:
    names = (
        'tandem_gateway_stage_seconds_count{stage="decoding"}',
        'tandem_gateway_jobs_finished_total{path="remote"}',
        'tandem_gateway_tokens_total{kind="completion"}',
        "tandem_gateway_time_to_first_token_seconds_count",
    )
    before = [scripted.gateway.metric(name) for name in names]
    scripted.chat()
    grown = [scripted.gateway.metric(name) - old for name, old in zip(names, before, strict=True)]
    assert grown == [1, 1, 2, 1]
