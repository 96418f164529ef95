"""What an entry of the log looks like, and how often a warning repeats."""

import io
import json
import threading
from datetime import datetime
from typing import Any

import pytest

from common import log as log_module
from common.log import WARNING_KEYS_MAX, WARNINGS_PER_WINDOW, WINDOW_MS, NodeLog
from common.log_events import LogEvent


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.value_ms = 0

    def __call__(self) -> int:
        return self.value_ms


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(log_module, "now_ms", fake)
    return fake


def new_log(stream: io.StringIO, **options: Any) -> NodeLog:
    return NodeLog(node="decode", incarnation="0123456789abcdef", stream=stream, **options)


def entries(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_entry_is_a_line_of_json_with_its_fields() -> None:
    stream = io.StringIO()
    new_log(stream).info(LogEvent.JOB_FINISHED, job="ab12", ms=3, tokens=[1, 2])
    [entry] = entries(stream)
    assert datetime.fromisoformat(entry.pop("ts")).utcoffset() is not None
    assert entry == {
        "level": "info",
        "event": "job.finished",
        "node": "decode",
        "incarnation": "0123456789abcdef",
        "job": "ab12",
        "ms": 3,
        "tokens": [1, 2],
    }


def test_a_field_cannot_pass_for_the_process() -> None:
    stream = io.StringIO()
    new_log(stream).info(LogEvent.SESSION_OPENED, node="prefill", level="error", ts="never", peer="x")
    [entry] = entries(stream)
    assert (entry["node"], entry["level"], entry["peer"]) == ("decode", "info", "x")
    assert entry["ts"] != "never"


@pytest.mark.parametrize(
    "value", ["two\nlines", "\x1b[2J", "\udcff", "a b", '"', b"\xff", None, {"a": {1, 2}}]
)
@pytest.mark.parametrize("form", ["json", "text"])
def test_any_value_stays_on_its_line_as_printable_ascii(form: str, value: Any) -> None:
    stream = io.StringIO()
    new_log(stream, form=form).info(LogEvent.JOB_REJECTED, label=value)
    line = stream.getvalue().removesuffix("\n")
    assert line.isascii()
    assert line.isprintable()
    assert "label" in line


def test_a_terminal_gets_text_and_a_pipe_gets_json() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        new_log(stream, form="auto").info(LogEvent.NODE_READY, endpoint="tcp://127.0.0.1:5700", note="a b")
    assert terminal.getvalue().endswith(
        'INFO    decode node.ready endpoint=tcp://127.0.0.1:5700 note="a b"\n'
    )
    assert entries(pipe)[0]["event"] == "node.ready"


def test_entries_below_the_level_are_left_out() -> None:
    stream = io.StringIO()
    log = new_log(stream, level="warning")
    log.debug(LogEvent.SESSION_OPENED)
    log.info(LogEvent.SESSION_OPENED)
    log.warning(LogEvent.PEER_PROTOCOL_ERROR)
    log.error(LogEvent.COMPUTE_FAILED)
    assert [entry["level"] for entry in entries(stream)] == ["warning", "error"]


def test_repeated_warnings_of_one_peer_are_counted_instead(clock: Clock) -> None:
    stream = io.StringIO()
    log = new_log(stream)
    for _ in range(WARNINGS_PER_WINDOW + 7):
        log.warning(LogEvent.PEER_PROTOCOL_ERROR, peer="p1")
    log.warning(LogEvent.PEER_PROTOCOL_ERROR, peer="p2")
    log.warning(LogEvent.HELLO_REFUSED, peer="p1")
    assert len(entries(stream)) == WARNINGS_PER_WINDOW + 2
    clock.value_ms = WINDOW_MS
    log.warning(LogEvent.PEER_PROTOCOL_ERROR, peer="p1")
    summary, last = entries(stream)[-2:]
    assert summary["event"] == "warnings.suppressed"
    assert (summary["warning"], summary["peer"], summary["suppressed"]) == ("peer.protocol_error", "p1", 7)
    assert last["event"] == "peer.protocol_error"


def test_closing_writes_the_counts_that_are_owed_once(clock: Clock) -> None:
    stream = io.StringIO()
    log = new_log(stream)
    for _ in range(WARNINGS_PER_WINDOW + 1):
        log.warning(LogEvent.HELLO_REFUSED)
    log.close()
    log.close()
    assert [entry.get("suppressed") for entry in entries(stream)] == [None] * WARNINGS_PER_WINDOW + [1]


def test_errors_are_never_suppressed(clock: Clock) -> None:
    stream = io.StringIO()
    log = new_log(stream)
    for _ in range(WARNINGS_PER_WINDOW * 3):
        log.error(LogEvent.COMPUTE_FAILED, peer="p1")
    assert len(entries(stream)) == WARNINGS_PER_WINDOW * 3


def test_many_peers_share_one_count_at_the_limit(clock: Clock) -> None:
    stream = io.StringIO()
    log = new_log(stream)
    for number in range(WARNING_KEYS_MAX + 50):
        log.warning(LogEvent.PEER_PROTOCOL_ERROR, peer=f"p{number}")
    assert len(entries(stream)) == WARNING_KEYS_MAX + WARNINGS_PER_WINDOW
    log.close()
    assert entries(stream)[-1]["suppressed"] == 50 - WARNINGS_PER_WINDOW


def test_threads_do_not_tear_entries_or_lose_counts(clock: Clock) -> None:
    stream = io.StringIO()
    log = new_log(stream)

    def work() -> None:
        for number in range(200):
            log.info(LogEvent.JOB_ACCEPTED, number=number)
            log.warning(LogEvent.JOB_REJECTED, peer="p1")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    written = entries(stream)
    assert sum(entry["event"] == "job.accepted" for entry in written) == 800
    assert sum(entry["event"] == "job.rejected" for entry in written) == WARNINGS_PER_WINDOW
    assert written[-1]["suppressed"] == 800 - WARNINGS_PER_WINDOW
