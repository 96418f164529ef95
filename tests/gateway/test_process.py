"""The gateway as a process: its command line, its start, its end."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common import client_messages as cm
from common.errors import ExitStatus
from tests.gateway.harness import GatewayProcess, poke, read_all, request_bytes
from tests.gateway.scripted import ScriptedNode, accepted, chat_body, finished
from tests.process.harness import ROOT, wait_until

Start = Callable[..., GatewayProcess]
MODEL = ("--served-model-name", "model")
NOWHERE = "ipc:///nowhere"


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedNode]:
    node = ScriptedNode(f"ipc://{tmp_path_factory.mktemp('g')}/n")
    node.on_submit = lambda submit: [accepted(submit)]
    yield node
    node.end()


def run(*flags: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "decode_node.gateway", *flags]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )


def test_version_and_help_load_no_web_framework() -> None:
    code = (
        "import sys\nfrom decode_node.gateway.__main__ import main\nsys.argv[1:] = ['--version']\n"
        "try:\n    main()\nexcept SystemExit:\n"
        "    print(sorted({'fastapi', 'zmq', 'uvicorn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[1] == "[]"
    assert done.stdout.startswith("gateway ")


def test_a_port_in_use_ends_with_one_line_that_says_what_to_do(gateways: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        gateway = gateways(NOWHERE, "--port", str(port), wait=False)
        assert gateway.exit_status() == ExitStatus.CONFIG
    (line,) = gateway.complaints
    assert f"port {port} at 127.0.0.1 is in use" in line
    assert "give another --port" in line


def test_it_serves_before_its_node_is_there_and_says_that_it_is_not_ready(gateways: Start) -> None:
    gateway = gateways(NOWHERE)
    assert gateway.get("/health/live").status_code == 200
    ready = gateway.get("/health/ready")
    assert (ready.status_code, ready.json()["ready"]) == (503, False)
    assert "nobody has answered at ipc:///nowhere" in ready.json()["reason"]
    for response in (gateway.get("/v1/models"), gateway.post("/v1/chat/completions", chat_body())):
        assert (response.status_code, response.json()["error"]["code"]) == (503, "node_unavailable")
        assert response.headers["retry-after"] == "1"
    assert gateway.metric("tandem_gateway_connected") == 0
    assert gateway.metric("tandem_decode_up") == 0
    gateway.signal(signal.SIGTERM)
    assert gateway.exit_status() == ExitStatus.OK
    assert gateway.complaints == []
    assert len(gateway.output) == 1


def test_the_first_signal_makes_it_unready_at_once_and_lets_running_answers_end(
    gateways: Start, node: ScriptedNode
) -> None:
    gateway = gateways(node.endpoint, *MODEL)
    gateway.wait_connected()
    with gateway.connect() as connection:
        connection.sendall(request_bytes("/v1/chat/completions", chat_body(stream=True)))
        node.wait_submitted()
        gateway.signal(signal.SIGTERM)
        wait_until(lambda: gateway.logged("node.draining"), "it drains", [])
        assert gateway.get("/health/ready").status_code == 503
        refused = gateway.post("/v1/chat/completions", chat_body())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        (job,) = node.submitted
        node.on_other = lambda message: [cm.Tokens(job.label, (5,), "a"), finished(job)]
        poke(gateway)
        assert b'"finish_reason":"stop"' in read_all(connection)
    assert gateway.exit_status() == ExitStatus.OK


def test_what_does_not_end_in_time_is_told_so_and_cancelled(gateways: Start, node: ScriptedNode) -> None:
    node.on_submit = lambda submit: [accepted(submit), cm.Tokens(submit.label, (5,), "a")]
    gateway = gateways(node.endpoint, *MODEL, "--drain-ms", "50")
    gateway.wait_connected()
    with gateway.connect() as connection, gateway.connect() as whole:
        connection.sendall(request_bytes("/v1/chat/completions", chat_body(stream=True)))
        whole.sendall(request_bytes("/v1/chat/completions", chat_body()))
        node.wait_submitted(2)
        gateway.signal(signal.SIGTERM)
        received = read_all(connection)
        assert read_all(whole).startswith(b"HTTP/1.1 503")
    assert b'"code": "shutting_down"' in received
    assert b"data: [DONE]" in received
    assert gateway.exit_status() == ExitStatus.DRAIN_INCOMPLETE
    node.wait_cancelled(2)


def test_the_second_signal_ends_it_at_once(gateways: Start, node: ScriptedNode) -> None:
    gateway = gateways(node.endpoint, *MODEL)
    gateway.wait_connected()
    with gateway.connect() as connection:
        connection.sendall(request_bytes("/v1/chat/completions", chat_body(stream=True)))
        node.wait_submitted()
        gateway.signal(signal.SIGTERM)
        wait_until(lambda: gateway.logged("node.draining"), "it drains", [])
        gateway.signal(signal.SIGTERM)
        assert gateway.exit_status() == ExitStatus.ABORTED


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# of the tests\nfirst-key\nsecond-key\n")
    path.chmod(0o600)
    return path


def test_with_api_keys_only_who_has_one_is_served(
    gateways: Start, node: ScriptedNode, key_file: Path
) -> None:
    node.on_submit = lambda submit: [accepted(submit), finished(submit)]
    gateway = gateways(node.endpoint, *MODEL, "--api-key-file", str(key_file))
    gateway.wait_connected()

    def ask(**headers: str) -> Any:
        return gateway.post("/v1/chat/completions", chat_body(), headers=headers)

    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first-key"}):
        response = ask(**headers)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    for key in ("first-key", "second-key"):
        assert ask(Authorization=f"Bearer {key}").status_code == 200
    for path in ("/v1/models", "/metrics", "/state", "/nothing"):
        assert gateway.get(path).status_code == 401
    for path in ("/health/live", "/health/ready", "/docs"):
        assert gateway.get(path).status_code == 200
    assert len(node.submitted) == 2


def test_a_host_for_everybody_with_keys_is_served(gateways: Start, key_file: Path) -> None:
    gateway = gateways(NOWHERE, "--host", "0.0.0.0", "--api-key-file", str(key_file))
    assert gateway.get("/health/live").status_code == 200


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--host", "0.0.0.0"), "give --api-key-file FILE"),
        (("--host", "model.example"), "give --api-key-file FILE"),
        (("--port", "70000"), "--port: must be a whole number from 0 to 65535, not '70000'"),
        (("--max-queue", "0"), "--max-queue: must be a whole number from 1 to 4096"),
        (("--decode", "http://x"), "--decode: "),
        (("--key-file", "k"), "--key-file and --server-key go together"),
        (("--api-key-file", "/nowhere/keys"), "cannot read /nowhere/keys"),
        (("--log-level", "loud"), "--log-level: must be one of debug, info"),
        (("--served-model-name", " "), "--served-model-name is empty"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_status_2(
    gateways: Start, flags: tuple[str, ...], words: str
) -> None:
    gateway = gateways(NOWHERE, *flags, wait=False)
    assert gateway.exit_status() == ExitStatus.CONFIG
    assert words in gateway.complaints[0]
    assert gateway.output == []


def test_a_key_file_that_others_can_read_or_that_is_empty_is_refused(gateways: Start, key_file: Path) -> None:
    key_file.chmod(0o644)
    gateway = gateways(NOWHERE, "--api-key-file", str(key_file), wait=False)
    assert gateway.exit_status() == ExitStatus.CONFIG
    assert f"chmod 600 {key_file}" in gateway.complaints[0]
    key_file.chmod(0o600)
    key_file.write_text("# nothing\n")
    empty = gateways(NOWHERE, "--api-key-file", str(key_file), wait=False)
    assert empty.exit_status() == ExitStatus.CONFIG
    assert "has no keys" in empty.complaints[0]
