"""Faults that other systems had and that only processes can show: orphans, forks, idle cost, late refusals.

Every daemon here is emulated. A test waits for what it wants to see and never for a duration, but where the
point is that a time has passed.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from common.clock import now_ms, pause_ms
from common.messages import Tokens
from tests.process.harness import ROOT, start
from tests.process.script_runs import Script, sockets_in
from tests.process.test_scripts import is_running
from tests.process.world import PREFETCH, World, prompt_of
from transport.client import Client
from transport.link import RouterLink
from transport.zmq_sockets import new_context

ENDED_MS = 15_000
IDLE_MS = 2_000
IDLE_CPU_SHARE_MAX = 0.02
NATURAL = ("--ping-ms", "500", "--suspect-ms", "1500", "--dead-after-ms", "3000", "--lease-ms", "5000")
LAUNCHER = """
import sys
from pathlib import Path
from common.clock import pause_ms
from transport.launch.daemon_process import DaemonProcess
daemon = DaemonProcess("decode_node", sys.argv[2:], Path(sys.argv[1]))
print(daemon.pid, flush=True)
while True:
    pause_ms(1_000)
"""
FORKED = """
import os, sys
from tests.contract.wires import wait_until
from transport.link import DealerLink, RouterLink
from transport.zmq_sockets import new_context

def talk(name):
    context = new_context()
    router = RouterLink(context, f"ipc://{sys.argv[1]}/{name}")
    dealer = DealerLink(context, router.endpoint, b"route")
    dealer.send(b"route", [name.encode()])
    [(_, frames)] = wait_until(lambda: router.receive(1))
    dealer.close()
    router.close()
    context.term()
    return frames == [name.encode()]

open_context = new_context()
held = RouterLink(open_context, f"ipc://{sys.argv[1]}/held")
assert talk("before")
child = os.fork()
if child == 0:
    os._exit(0 if talk("child") else 1)
assert os.waitpid(child, 0)[1] == 0
assert talk("after")
held.close()
open_context.term()
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    # Not pytest's own directory: its path would not fit a socket.
    with TemporaryDirectory(prefix="tandem-test-") as name:
        yield Path(name)


def wait_for(probe: Callable[[], object], what: str, bound_ms: int = 45_000) -> None:
    deadline_ms = now_ms() + bound_ms
    while not probe():
        assert now_ms() < deadline_ms, what
        pause_ms(5)


FLAGS = {
    "importing": ("--backend", "emulated"),
    "loading": ("--backend", "torch"),
    "generating": ("--backend", "emulated", "--emulated-decode-ms", "50", "--drain-ms", "300"),
}


@pytest.mark.parametrize("moment", FLAGS)
def test_k17_a_daemon_ends_with_its_launcher_whatever_it_is_doing(directory: Path, moment: str) -> None:
    endpoint, log = f"ipc://{directory}/decode", directory / "decode_node.log"
    (directory / "torch.py").write_text("import threading\nthreading.Event().wait()\n")
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(directory), "--bind", endpoint, *FLAGS[moment]],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(directory)},
        stdout=subprocess.PIPE,
        text=True,
    )
    daemon = int(launcher.stdout.readline())
    try:
        if moment == "loading":
            wait_for(lambda: '"node.loading"' in log.read_text(), "the model is being loaded")
        if moment == "generating":
            wait_for(lambda: '"node.ready"' in log.read_text(), "it is ready")
            with Client(endpoint) as client:
                client.submit("job", prompt_ids=[97, 98], sampling={"max_tokens": 900, "ignore_eos": True})
                heard: list[object] = []
                while not any(isinstance(message, Tokens) for message in heard):
                    heard += client.events()
                launcher.kill()
                wait_for(lambda: not is_running(daemon), log.read_text(), ENDED_MS)
        launcher.kill()
        wait_for(lambda: not is_running(daemon), log.read_text(), ENDED_MS)
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
        if is_running(daemon):
            os.kill(daemon, signal.SIGKILL)
    assert [path.name for path in directory.glob("decode*[!tg]")] == [], "its socket is gone"


@pytest.mark.parametrize("moment", ["decode_node.log", '"node.bound"'])
def test_k17_a_launcher_that_is_stopped_while_it_starts_leaves_no_process(
    directory: Path, moment: str
) -> None:
    launcher = Script(directory, "up", "--backend", "emulated")

    def reached() -> list[Path]:
        logs = list(directory.rglob("*_node.log"))
        return [log for log in logs if moment in log.name or moment in log.read_text()]

    launcher.wait_for(reached)
    started = children_of(launcher.process.pid)
    assert started
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait() == 0, launcher.errors
    assert [pid for pid in started if is_running(pid)] == []
    assert sockets_in(directory) == []
    assert "Traceback" not in launcher.errors


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_k23_an_endpoint_in_use_is_found_before_any_model_is_touched(directory: Path) -> None:
    (directory / "torch.py").write_text("import os\nos._exit(99)\n")
    endpoint = f"ipc://{directory}/taken"
    context = new_context()
    holder = RouterLink(context, endpoint)
    flags = ("--backend", "torch", "--bind", endpoint)
    with start("decode_node", *flags, PYTHONPATH=str(directory)) as process:
        output, complaint = process.communicate(timeout=30)
    holder.close()
    context.term()
    assert (process.returncode, output) == (2, "")
    assert f"{endpoint} is in use" in complaint


def test_k10_a_process_that_forks_may_go_on_on_both_sides_with_a_context_of_its_own(directory: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(directory)], env=environment, capture_output=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, b"")


def cpu_ns(pid: int) -> int:
    """What all threads of a process have run so far."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def descriptors_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_k10_k24_an_idle_pair_costs_next_to_nothing_and_many_jobs_leave_it_no_sockets(
    directory: Path,
) -> None:
    with closing(World(directory)) as world:
        pair = world.pair(NATURAL, (*PREFETCH, *NATURAL))
        pids = [daemon.process.pid for daemon in (pair.prefill, pair.decode)]
        with Client(pair.decode.endpoint) as client:
            assert client.status()["idle"]
        before = [(cpu_ns(pid), descriptors_of(pid)) for pid in pids]
        until_ms = now_ms() + IDLE_MS
        world.wait(lambda: now_ms() > until_ms, "nothing happens")
        for pid, (used_ns, _) in zip(pids, before, strict=True):
            assert cpu_ns(pid) - used_ns < IDLE_CPU_SHARE_MAX * IDLE_MS * 1_000_000
        for number in range(10):
            with Client(pair.decode.endpoint) as client:
                for label in "abcd":
                    client.submit(label, prompt_ids=prompt_of(9, number), sampling={"max_tokens": 1})
                while client.live:
                    list(client.events())
        world.wait(
            lambda: [descriptors_of(pid) for pid in pids] == [count for _, count in before],
            f"as many descriptors as before: {before}",
        )
        pair.audit()
