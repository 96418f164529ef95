"""Gateway processes, and small ways to talk to them.

Decides how a test starts, watches and stops a gateway. Used by the tests beside it. What a gateway is given
to talk to is either a real pair (`tests/process/world.py`) or a scripted node on a thread of the test.
"""

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx

from tests.gateway.nursery import gateway_nursery
from tests.process.harness import wait_until

START_MS = 30_000


class GatewayProcess:
    """One gateway; entries: its log. Started without waiting unless told otherwise."""

    def __init__(self, decode: str, *flags: str, wait: bool = True, **environment: str) -> None:
        given = ("--decode", decode, "--port", "0", "--log-form", "json", *flags)
        self.process = gateway_nursery().start("decode_node.gateway", given, {**os.environ, **environment})
        self.entries: list[dict[str, Any]] = []
        self.complaints: list[str] = []
        self.output: list[str] = []
        self.url = ""
        self._http = httpx.Client(timeout=20)
        self._threads = [
            threading.Thread(target=self._read_output, daemon=True),
            threading.Thread(target=self._read_log, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        if wait:
            self.wait_ready()

    def _read_output(self) -> None:
        self.output += self.process.stdout

    def _read_log(self) -> None:
        for line in self.process.stderr:
            if line.startswith("{"):
                self.entries.append(json.loads(line))
            else:
                self.complaints.append(line.rstrip())

    def wait_ready(self) -> None:
        """Until its ready line is there; then `url` is known."""
        wait_until(lambda: self.logged("node.ready") or self.ended, "the gateway is ready", [])
        assert not self.ended, self.complaints
        self.url = self.logged("node.ready")[0]["endpoint"]

    def wait_connected(self) -> None:
        """Until it has a session and its node says that it is ready."""
        wait_until(lambda: self.get("/health/ready").status_code == 200, "the gateway is connected", [])

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [entry for entry in list(self.entries) if entry["event"] == event]

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self._http.get(self.url + path, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self._http.post(self.url + path, json=body, **options)

    def raw_post(self, path: str, text: bytes, kind: str) -> httpx.Response:
        """A POST of anything."""
        return self._http.post(self.url + path, content=text, headers={"content-type": kind})

    def stream(self, body: Any, timeout: float = 20) -> AbstractContextManager[httpx.Response]:
        """A chat whose answer is read as it comes."""
        return self._http.stream("POST", self.url + "/v1/chat/completions", json=body, timeout=timeout)

    def metric(self, name: str) -> float:
        """The present value of a sample, labels and all, 0 when there is none."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.split()[-1])
        return 0.0

    def wait_metric(self, name: str, value: float) -> None:
        wait_until(lambda: self.metric(name) >= value, f"{name} reaches {value}", [])

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        return url.host, url.port

    def connect(self) -> socket.socket:
        """A bare connection."""
        return socket.create_connection(self.address, timeout=20)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_status(self) -> int:
        """Wait for its end."""
        wait_until(lambda: self.ended, "the gateway ends", [])
        for thread in self._threads:
            thread.join(5)
        return self.process.returncode

    def close(self) -> None:
        """End it, however it is."""
        self._http.close()
        if not self.ended:
            self.process.kill()
        self.exit_status()
        self.process.stdout.close()
        self.process.stderr.close()


def poke(gateway: GatewayProcess) -> None:
    """Have the gateway send its node something that is no job, so that a script goes on."""
    with contextlib.suppress(httpx.ReadTimeout):
        gateway.post("/tokenize", {"prompt": "x"}, timeout=0.05)


def read_all(connection: socket.socket) -> bytes:
    """Everything until its end."""
    received = b""
    while part := connection.recv(2**20):
        received += part
    return received


def request_bytes(path: str, body: Any) -> bytes:
    """A POST as it travels."""
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text


def events_of(response: httpx.Response) -> list[Any]:
    """The events of a stream that has ended: JSON values, and "[DONE]"."""
    return list(parsed(response.text.splitlines()))


def parsed(lines: Iterator[str] | list[str]) -> Iterator[Any]:
    """Values of `data:` lines."""
    for line in lines:
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def check_stream(events: list[Any], choices: int = 1, usage: bool = False) -> str:
    """Every stream's form: one finish reason for each choice, then usage if asked for, then the end.

    The text of choice 0.
    """
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    texts = dict.fromkeys(range(choices), "")
    reasons: dict[int, str] = {}
    tail = events[:-1]
    if usage:
        assert tail[-1]["choices"] == []
        assert tail[-1]["usage"]["total_tokens"] > 0
        tail = tail[:-1]
        assert all(event["usage"] is None for event in tail)
    else:
        assert all("usage" not in event for event in tail)
    for event in tail:
        (choice,) = event["choices"]
        index = choice["index"]
        assert index not in reasons, "a choice goes on after its finish reason"
        texts[index] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        if choice["finish_reason"] is not None:
            reasons[index] = choice["finish_reason"]
    assert sorted(reasons) == list(range(choices))
    assert set(reasons.values()) <= {"stop", "length"}
    assert len({event["id"] for event in tail}) == 1
    return texts[0]
