"""The gateway as curl meets it."""

import json
import shutil
import subprocess

import pytest

from tests.gateway.harness import GatewayProcess

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl on this machine")
JSON = ("-H", "Content-Type: application/json")


def curl(*arguments: str) -> str:
    command = ["curl", "--silent", "--show-error", "--max-time", "20", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl_gets_a_whole_answer(gateway: GatewayProcess) -> None:
    body = {"model": "emulated-0", "prompt": "abc", "max_tokens": 5, "ignore_eos": True}
    answer = json.loads(curl(f"{gateway.url}/v1/completions", *JSON, "-d", json.dumps(body)))
    assert answer["usage"]["completion_tokens"] == 5
    assert len(answer["choices"][0]["text"]) == 5


def test_curl_gets_a_stream_that_ends_as_streams_do(gateway: GatewayProcess) -> None:
    turns = [{"role": "user", "content": "abc"}]
    body = {"model": "emulated-0", "messages": turns, "max_tokens": 5, "stream": True, "ignore_eos": True}
    lines = curl("--no-buffer", f"{gateway.url}/v1/chat/completions", *JSON, "-d", json.dumps(body)).split(
        "\n\n"
    )
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert sum(chunk["choices"][0]["finish_reason"] is not None for chunk in chunks) == 1
    assert len("".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)) == 5


def test_curl_is_told_what_is_wrong_with_a_form(gateway: GatewayProcess) -> None:
    status = curl(
        "--output", "/dev/null", "--write-out", "%{http_code}", f"{gateway.url}/v1/completions", "-d", "a=b"
    )
    assert status == "415"
