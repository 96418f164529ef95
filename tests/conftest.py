"""What every test stands on: a clean environment, and nothing left behind.

Applies to all tests. A `TANDEM_` variable of the developer must not change a result, and a thread or child
process that outlives its test would change the next one's. Fixtures of one kind of test live beside it.
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

THREAD_END_S = 5.0


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TANDEM_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    threads, children = set(threading.enumerate()), _children()
    yield
    started = [thread for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    for thread in started:
        thread.join(THREAD_END_S)
    assert [thread.name for thread in started if thread.is_alive()] == []
    assert _children() <= children, "a child process was left behind"


def _children() -> set[str]:
    """Process ids of this process's children, the finished ones that nobody waited for included."""
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        return set()
    children: set[str] = set()
    for task in tasks.glob("*/children"):
        try:
            children.update(task.read_text().split())
        except FileNotFoundError:
            continue  # that thread ended meanwhile
    return children
