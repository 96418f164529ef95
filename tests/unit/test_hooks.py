"""The testing instrument itself: hold, fail, spoil; and the pinning of processes."""

import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from common.cpus import available_cpus, pin_process, thread_count
from common.hooks import HoldPoints, HookFailure
from common.log import NodeLog

WAIT_S = 10.0


class WatchedStream(io.StringIO):
    """Sets `held` when the log says that a thread is held."""

    def __init__(self) -> None:
        super().__init__()
        self.held = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        if "hook.held" in text:
            self.held.set()
        return count


@pytest.fixture
def stream() -> WatchedStream:
    return WatchedStream()


@pytest.fixture
def points(tmp_path: Path, stream: WatchedStream) -> HoldPoints:
    return HoldPoints(str(tmp_path), NodeLog(node="decode", incarnation="i", stream=stream))


def test_without_a_directory_or_a_file_nothing_happens(points: HoldPoints, stream: WatchedStream) -> None:
    log = NodeLog(node="decode", incarnation="i", stream=stream)
    assert HoldPoints(None, log).at("decode.import") is None
    assert points.at("decode.import") is None
    assert stream.getvalue() == ""


@pytest.mark.parametrize("text", ["hold", "hold\n", ""])
@pytest.mark.parametrize("after", [None, "corrupt"])
def test_a_thread_is_held_until_the_file_is_gone_or_says_otherwise(
    points: HoldPoints, stream: WatchedStream, tmp_path: Path, text: str, after: str | None
) -> None:
    file = tmp_path / "decode.import"
    file.write_text(text)
    results: list[str | None] = []
    thread = threading.Thread(target=lambda: results.append(points.at("decode.import")))
    thread.start()
    assert stream.held.wait(WAIT_S)
    assert results == []
    file.unlink() if after is None else file.write_text(after)
    thread.join(WAIT_S)
    assert results == [after]
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(entry["event"], entry["point"]) for entry in events] == [
        ("hook.held", "decode.import"),
        ("hook.released", "decode.import"),
    ]


def test_fail_raises_each_time_and_fail_once_only_once(points: HoldPoints, tmp_path: Path) -> None:
    (tmp_path / "always").write_text("fail")
    (tmp_path / "once").write_text("fail once")
    for point in ("always", "always", "once"):
        with pytest.raises(HookFailure, match=point):
            points.at(point)
    assert points.at("once") is None


def test_other_actions_are_for_the_caller(points: HoldPoints, tmp_path: Path) -> None:
    (tmp_path / "chunk").write_text("corrupt once")
    assert [points.at("chunk"), points.at("chunk")] == ["corrupt", None]
    (tmp_path / "chunk").write_text("corrupt")
    assert [points.at("chunk"), points.at("chunk")] == ["corrupt", "corrupt"]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot pin processes")
def test_pinning_reaches_every_thread_of_the_process() -> None:
    cpu = max(available_cpus())
    program = f"""
import io, os, threading
from common.cpus import pin_process, thread_count
from common.log import NodeLog
ready, done = threading.Event(), threading.Event()
before = threading.Thread(target=lambda: (ready.set(), done.wait()))
before.start()
ready.wait()
pin_process(({cpu},), NodeLog(node="prefill", incarnation="i"))
print({{frozenset(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}})
done.set()
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == f"{{frozenset({{{cpu}}})}}"


def test_a_system_that_cannot_pin_says_so(monkeypatch: pytest.MonkeyPatch, stream: WatchedStream) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    pin_process((0,), NodeLog(node="decode", incarnation="i", stream=stream))
    assert json.loads(stream.getvalue())["event"] == "node.not_pinned"
    assert thread_count((0,)) == 1
