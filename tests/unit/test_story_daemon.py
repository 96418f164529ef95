"""When a daemon writes its story, and that nothing about it changes how the daemon ends."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import transport.daemon
from common.errors import ExitStatus, InvariantViolation, check
from common.limits import STEPS_PER_CHECK
from common.log import NodeLog
from common.prefill_config import PrefillConfig
from common.story import reason_of
from prefill_node.events import ChunkComputed, StopRequested
from tests.actors import PrefillSide
from tests.sim import replay_story
from transport.daemon import Daemon
from transport.loop import Loop, Mailbox
from transport.peers import Tick
from transport.story_file import story_directory


class BareNode:
    """A prefill node without engine and sockets: `receive` is the test's."""

    role = "prefill"
    incarnation = "0123456789abcdef"

    def __init__(self, receive: Callable[["BareNode"], Iterator[Any]]) -> None:
        self.leaving: tuple[int, str] | None = None
        self.closed = False
        self.side = PrefillSide(self.incarnation, 1)
        self._receive = receive

    @property
    def stack(self) -> Any:
        return self.side.stack

    def bind(self, loop: Loop) -> str:
        self.mailbox = Mailbox(loop.wakeup)
        return "nowhere"

    def load(self) -> bool:
        return True

    def receive(self) -> Iterator[Any]:
        return self._receive(self)

    def step(self, event: Any, now_ms: int) -> list[Any]:
        return self.stack.step(event, now_ms)

    def execute(self, effect: Any, now_ms: int) -> list[Any]:
        return []

    def flush(self, now_ms: int) -> list[Any]:
        return []

    def deadline_ms(self, now_ms: int) -> int | None:
        return now_ms

    def check(self) -> None:
        self.stack.core.check()

    def stop_requested(self) -> Any:
        return StopRequested()

    def close(self, orderly: bool) -> None:
        self.closed = True


class Ended(Exception):
    """Instead of the end of this process."""


@pytest.fixture
def run_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, list[dict]]]:
    def run(
        receive: Callable[[BareNode], Iterator[Any]], directory: Path = tmp_path
    ) -> tuple[int, list[dict]]:
        def end(status: int) -> None:
            daemon._loop.close()
            raise Ended(int(status))

        monkeypatch.setattr(transport.daemon.os, "_exit", end)
        config = PrefillConfig(backend="emulated", story_dir=str(tmp_path))
        # A model is frozen; the directory was there when the daemon began.
        object.__setattr__(config, "story_dir", str(directory))
        stream = io.StringIO()
        log = NodeLog(node="prefill", incarnation=BareNode.incarnation, form="json", stream=stream)
        node = BareNode(receive)
        daemon = Daemon(node, log, config)
        with pytest.raises(Ended) as ended:
            daemon.run()
        assert node.closed
        return ended.value.args[0], [json.loads(line) for line in stream.getvalue().splitlines()]

    return run


def story_of(entries: list[dict]) -> Path:
    return Path(next(entry["path"] for entry in entries if entry["event"] == "story.written"))


def test_a_thread_that_died_is_a_story_that_plays_to_its_end(run_daemon, capsys) -> None:
    def receive(node: BareNode) -> Iterator[Any]:
        yield Tick()
        node.mailbox.guard(lambda: [][0])
        yield from node.mailbox.take()

    status, entries = run_daemon(receive)
    path = story_of(entries)
    head = json.loads(path.read_text().splitlines()[0])
    assert status == ExitStatus.INVARIANT
    assert (head["place"], head["steps"]) == ("outside", 1)
    assert "a thread died" in head["reason"]
    assert replay_story.main([str(path)]) == 0
    assert "the fault lies outside of the stack" in capsys.readouterr().out


def test_a_broken_check_is_a_story_that_plays(run_daemon, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def broken(core: Any) -> None:
        check(core.hellos_refused < 0, "INV-1: planted")

    monkeypatch.setattr("prefill_node.core.PrefillCore.check", broken)
    status, entries = run_daemon(lambda node: iter([Tick()] * STEPS_PER_CHECK))
    assert status == ExitStatus.INVARIANT
    assert replay_story.main([str(story_of(entries))]) == 0
    assert "recorded: check: INV-1: planted" in capsys.readouterr().out


def test_an_exception_that_nobody_meant_is_a_story_too(run_daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_node.core.PrefillCore._on_time_passed", lambda core, event, now_ms: 1 / 0)
    status, entries = run_daemon(lambda node: iter([Tick()]))
    path = story_of(entries)
    head = json.loads(path.read_text().splitlines()[0])
    assert status == ExitStatus.INVARIANT
    assert (head["place"], head["reason"]) == ("step", "ZeroDivisionError('division by zero')")
    assert [entry["event"] for entry in entries if entry["level"] == "error"] == [
        "node.failed",
        "story.written",
    ]


def test_a_story_that_cannot_be_written_changes_nothing_else(run_daemon, tmp_path: Path) -> None:
    def receive(node: BareNode) -> Iterator[Any]:
        yield ChunkComputed(0, 1, 4, b"", 1)

    status, entries = run_daemon(receive, directory=tmp_path / "gone")
    events = [entry["event"] for entry in entries if entry["level"] == "error"]
    assert status == ExitStatus.INVARIANT
    assert events == ["invariant.violated", "story.failed"]
    assert entries[-1]["event"] == "node.stopped"
    assert "compute answered for a slot it does not have" in entries[-1]["reason"]


def test_without_a_flag_a_story_goes_where_pairs_run_or_to_temporary_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert story_directory(None) == tmp_path / "tandem"
    assert story_directory("/elsewhere") == Path("/elsewhere")
    (tmp_path / "tandem").chmod(0o755)
    assert story_directory(None) not in (tmp_path / "tandem", Path())
    assert story_directory(None).is_dir()


def test_the_reason_of_a_violation_is_its_words() -> None:
    assert reason_of(InvariantViolation("INV-2: twice")) == "INV-2: twice"
    assert reason_of(KeyError("job")) == "KeyError('job')"
