"""Taking an endpoint: one daemon each, stale files removed, and a readable refusal otherwise."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from common.errors import ConfigError
from common.limits import IPC_PATH_BYTES
from tests.contract.wires import wait_until
from transport.link import DealerLink, RouterLink, Sent
from transport.zmq_sockets import IpcLock, new_context

THREADS = 4
ROUNDS = 100

HOLDER = """
import sys
from transport.link import RouterLink
from transport.zmq_sockets import new_context
router = RouterLink(new_context(), sys.argv[1])
sys.stdout.write(router.endpoint + "\\n")
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = new_context()
    yield made
    made.term()


@contextmanager
def bound(context: zmq.Context, endpoint: str) -> Iterator[RouterLink]:
    router = RouterLink(context, endpoint)
    try:
        yield router
    finally:
        router.close()


@contextmanager
def holder(endpoint: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """Another process that holds an endpoint, and the resolved endpoint."""
    command = [sys.executable, "-c", HOLDER, endpoint]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def answers(context: zmq.Context, router: RouterLink) -> bool:
    """Whether a new peer reaches the router and gets an answer."""
    dealer = DealerLink(context, router.endpoint, b"probe")
    try:
        dealer.send(b"probe", [b"ping"])
        [(route, _)] = wait_until(lambda: router.receive(1))
        assert router.send(route, [b"pong"]) is Sent.YES
        return wait_until(lambda: dealer.receive(1)) == [(b"probe", [b"pong"])]
    finally:
        dealer.close()


def test_a_second_bind_on_a_live_ipc_path_is_refused_and_changes_nothing(
    context: zmq.Context, short_directory: Path
) -> None:
    endpoint = f"ipc://{short_directory}/s"
    with bound(context, endpoint) as router:
        before = sorted(short_directory.iterdir())
        for _ in range(3):
            with pytest.raises(ConfigError, match=re.escape(f"{endpoint} is in use: stop the daemon")):
                RouterLink(context, endpoint)
        assert sorted(short_directory.iterdir()) == before
        assert answers(context, router)
    assert list(short_directory.iterdir()) == []


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_an_endpoint_of_another_process_is_refused_until_that_is_killed(
    context: zmq.Context, short_directory: Path, kind: str
) -> None:
    asked = "tcp://127.0.0.1:0" if kind == "tcp" else f"ipc://{short_directory}/s"
    with holder(asked) as (process, endpoint):
        with pytest.raises(ConfigError, match=re.escape(f"{endpoint} is in use")):
            RouterLink(context, endpoint)
        process.send_signal(signal.SIGKILL)
        process.wait()
        # A killed process removes nothing: the stale socket file and lock must not be in the way.
        assert sorted(path.name for path in short_directory.iterdir()) == (
            [] if kind == "tcp" else ["s", "s.lock"]
        )
        with bound(context, endpoint) as router:
            assert answers(context, router)
    assert list(short_directory.iterdir()) == []


def test_an_endpoint_is_free_again_as_soon_as_its_holder_has_closed_it(
    context: zmq.Context, short_directory: Path
) -> None:
    # The closed socket's own end, on ZeroMQ's thread, must not take the next one's file away.
    endpoint = f"ipc://{short_directory}/s"
    for _ in range(40):
        with bound(context, endpoint) as router:
            assert answers(context, router)


def test_of_many_that_want_the_lock_one_has_it_at_a_time(short_directory: Path) -> None:
    path = short_directory / "s"
    inside: list[int] = []
    faults: list[str] = []
    taken = [0] * THREADS

    def compete(number: int) -> None:
        while taken[number] < ROUNDS:
            try:
                lock = IpcLock(str(path))
            except ConfigError:
                continue
            inside.append(number)
            try:
                path.touch(exist_ok=False)  # whoever holds the lock finds no other's socket file
            except FileExistsError:
                faults.append("the path was taken")
            if inside != [number]:
                faults.append(f"{inside} at once")
            path.unlink(missing_ok=True)
            inside.remove(number)
            taken[number] += 1
            lock.release()

    threads = [threading.Thread(target=compete, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert list(short_directory.iterdir()) == []


def test_a_lock_file_removed_by_its_holder_after_it_was_opened_does_not_count(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The race made certain: the first open gets the file that its holder then removes and lets go.
    path = short_directory / "s"
    holder = IpcLock(str(path))
    opens: list[str] = []
    real_open = os.open

    def open_then_lose(*arguments: object) -> int:
        descriptor = real_open(*arguments)
        opens.append("opened")
        if len(opens) == 1:
            holder.release()
        return descriptor

    monkeypatch.setattr(os, "open", open_then_lose)
    lock = IpcLock(str(path))
    monkeypatch.undo()
    assert len(opens) == 2
    with pytest.raises(ConfigError, match="is in use"):
        IpcLock(str(path))
    lock.release()


@pytest.mark.parametrize("occupant", ["file", "directory", "link"])
def test_a_path_that_is_no_socket_is_refused_and_left_alone(
    context: zmq.Context, short_directory: Path, occupant: str
) -> None:
    path, target = short_directory / "s", short_directory / "precious"
    target.write_text("data")
    if occupant == "file":
        path.write_text("data")
    elif occupant == "directory":
        path.mkdir()
    else:
        path.symlink_to(target)
    with pytest.raises(ConfigError, match="exists and is no socket"):
        RouterLink(context, f"ipc://{path}")
    assert path.exists()
    assert path.is_dir() or path.read_text() == "data"
    assert sorted(short_directory.iterdir()) == [target, path]


@pytest.mark.parametrize("parent", ["missing", "file"])
def test_a_path_without_a_directory_is_refused_with_its_reason(
    context: zmq.Context, short_directory: Path, parent: str
) -> None:
    (short_directory / "file").touch()
    expected = "No such file or directory" if parent == "missing" else "Not a directory"
    with pytest.raises(ConfigError, match=rf"cannot bind ipc://.*/{parent}/s: {expected}"):
        RouterLink(context, f"ipc://{short_directory}/{parent}/s")
    assert [path.name for path in short_directory.iterdir()] == ["file"]


def test_a_path_too_long_for_a_socket_is_refused_and_leaves_no_lock(
    context: zmq.Context, short_directory: Path
) -> None:
    longest = str(short_directory / "s").ljust(IPC_PATH_BYTES, "x")
    with bound(context, f"ipc://{longest}") as router:
        assert answers(context, router)
    with pytest.raises(ConfigError, match="cannot bind ipc://"):
        RouterLink(context, f"ipc://{longest}x")
    assert list(short_directory.iterdir()) == []


def test_a_port_of_any_other_program_is_refused_with_a_remedy(context: zmq.Context) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"{re.escape(endpoint)} is in use.*port 0 picks one"):
            RouterLink(context, endpoint)


@pytest.mark.parametrize(
    "endpoint", ["tcp://203.0.113.7:5555", "tcp://no.such.host.invalid:5555", "tcp://127.0.0.1"]
)
def test_an_address_that_is_not_ours_is_refused(context: zmq.Context, endpoint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"cannot bind {endpoint}")):
        RouterLink(context, endpoint)


def test_port_0_is_resolved_and_each_bind_gets_its_own(context: zmq.Context) -> None:
    with bound(context, "tcp://127.0.0.1:0") as first, bound(context, "tcp://127.0.0.1:0") as second:
        assert first.endpoint != second.endpoint
        for router in (first, second):
            assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9][0-9]{3,4}", router.endpoint)
            assert answers(context, router)


def test_the_lock_is_for_its_owner_alone(context: zmq.Context, short_directory: Path) -> None:
    with bound(context, f"ipc://{short_directory}/s"):
        assert (short_directory / "s.lock").stat().st_mode & 0o777 == 0o600
