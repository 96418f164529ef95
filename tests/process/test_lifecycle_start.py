"""What a daemon does before it is ready: its words, refusals, endpoints, and signals that come early."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.process.harness import Daemon, slabs_of, start_afresh
from tests.process.world import World, prompt_of

WORKER = ("--pd-prefill-worker", "ipc:///nowhere/prefill")
NO_MODEL = ("--model", "/nowhere/model")
MARKER = 99
CPU_SECONDS_MAX = 1.0


@pytest.fixture
def without_engines(tmp_path: Path) -> dict[str, str]:
    """An environment in which importing an engine's library ends the process with a marker."""
    for library in ("torch", "transformers", "gguf", "safetensors"):
        (tmp_path / f"{library}.py").write_text(f"import os\nos._exit({MARKER})\n")
    return {"PYTHONPATH": str(tmp_path)}


def run(program: str, *flags: str, **environment: str) -> tuple[int, str, str, float]:
    """A daemon that ends by itself: exit status, stdout, stderr, CPU seconds (the machine may be busy)."""
    before = os.times()
    with start_afresh(program, *flags, **environment) as process:
        output, complaint = process.communicate(timeout=30)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return process.returncode, output, complaint, used


REFUSALS = {
    "prefetch without a prefill node": (
        "decode_node",
        ("--pd-prefetch-next",),
        "--pd-prefill-worker",
    ),
    "prefetch with local prefill allowed": (
        "decode_node",
        ("--pd-prefetch-next", *WORKER),
        "add --pd-remote-only",
    ),
    "a depth of 0": ("decode_node", ("--pd-prefetch-next", "0", "--pd-remote-only", *WORKER), "greater"),
    "atom with local prefill": ("decode_node", ("--backend", "atom", *WORKER), "add --pd-remote-only"),
    "two lanes on atom": (
        "decode_node",
        ("--backend", "atom", "--slots", "2", "--pd-remote-only", *WORKER),
        "--slots 2",
    ),
    "an unknown backend": ("decode_node", ("--backend", "abacus"), "no backend 'abacus'"),
    "an unknown prefill backend": ("prefill_node", ("--backend", "abacus"), "no such backend"),
    "a prefill backend that only decodes": ("prefill_node", ("--backend", "atom"), "cannot prefill"),
    "remote-only with the policy local": (
        "decode_node",
        ("--pd-remote-only", "--on-prefill-failure", "local", *WORKER),
        "--on-prefill-failure local",
    ),
    "remote-only without a prefill node": ("decode_node", ("--pd-remote-only",), "--pd-prefill-worker"),
    "a lease that is not longer than dead-after": ("prefill_node", ("--lease-ms", "3000"), "--lease-ms 3000"),
    "an unknown flag": ("decode_node", ("--pd-prefetch",), "--pd-prefetch"),
    "a bind to the world": ("prefill_node", ("--bind", "tcp://0.0.0.0:0"), "non-loopback"),
    "a path too long for a socket": ("prefill_node", ("--bind", f"ipc:///tmp/{'x' * 108}"), "107"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_instant_and_looks_at_no_model(without_engines: dict[str, str], case: str) -> None:
    program, flags, hint = REFUSALS[case]
    status, output, complaint, cpu_seconds = run(program, *flags, *NO_MODEL, **without_engines)
    assert (status, output) == (2, "")
    assert hint in complaint
    assert complaint.startswith(f"python -m {program}: error: ")
    assert "Traceback" not in complaint
    assert cpu_seconds < CPU_SECONDS_MAX


def test_the_marker_of_the_refusals_would_be_seen(without_engines: dict[str, str]) -> None:
    status, *_ = run("prefill_node", "--backend", "torch", "--bind", "tcp://127.0.0.1:0", **without_engines)
    assert status == MARKER


@pytest.mark.parametrize("program", ["prefill_node", "decode_node"])
def test_help_and_version_are_instant(without_engines: dict[str, str], program: str) -> None:
    status, output, complaint, cpu_seconds = run(program, "--help", **without_engines)
    assert (status, complaint) == (0, "")
    assert "--hold-dir" in output
    assert cpu_seconds < CPU_SECONDS_MAX
    status, output, complaint, _ = run(program, "--version", **without_engines)
    assert (status, complaint, output.split()[0]) == (0, "", program)


def test_stdout_holds_the_ready_line_alone(world: World) -> None:
    pair = world.pair()
    pair.check_job("job", prompt_of(20))
    pair.audit(imports=1)
    for daemon in (pair.prefill, pair.decode):
        assert len(daemon.output) == 1
        line = json.loads(daemon.output[0])
        assert line.keys() == {"ready", "role", "endpoint", "pid", "incarnation"}
        assert (line["role"], line["endpoint"]) == (daemon.role, daemon.endpoint)


def test_port_0_is_resolved_in_the_ready_line_and_two_pairs_do_not_meet(world: World) -> None:
    for number in range(2):
        prefill = world.prefill(bind="tcp://127.0.0.1:0")
        decode = world.decode(prefill, "--pd-remote-only", bind="tcp://127.0.0.1:0")
        for daemon in (prefill, decode):
            assert int(daemon.endpoint.rsplit(":", 1)[1]) > 0
        client = world.client(decode)
        assert world.end_of(client.submit("job", prompt_of(30, number), max_tokens=4)).code is None
    for daemon in reversed(world.daemons):
        world.stop(daemon)


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_an_endpoint_in_use_is_refused_and_its_holder_is_not_disturbed(world: World, kind: str) -> None:
    bind = "tcp://127.0.0.1:0" if kind == "tcp" else f"ipc://{world.directory}/taken"
    holder = world.prefill(bind=bind)
    status, output, complaint, _ = run("decode_node", "--backend", "emulated", "--bind", holder.endpoint)
    assert (status, output) == (2, "")
    assert f"{holder.endpoint} is in use" in complaint
    assert world.status(holder)["role"] == "prefill"
    world.stop(holder)


def test_what_a_killed_daemon_left_behind_is_taken_over(world: World) -> None:
    pair = world.pair()
    pair.check_job("job", prompt_of(20))
    slabs = set(slabs_of(pair.prefill.process.pid))
    assert len(slabs) == 1
    for daemon in (pair.prefill, pair.decode):
        world.kill(daemon)
    left = pair.prefill.files_left()
    assert pair.prefill.endpoint.removeprefix("ipc://") in left
    again = world.pair()
    again.check_job("job", prompt_of(20))
    assert not slabs.pop().exists()
    again.audit(imports=1)


def _signalled(world: World, daemon: Daemon) -> int:
    daemon.signal(signal.SIGTERM)
    status = world.exit_of(daemon, deadline_ms=5_000)
    assert list(world.directory.glob("early*[!d]")) == [], "a socket or lock was left"
    return status


@pytest.mark.parametrize("program", ["prefill_node", "decode_node"])
@pytest.mark.parametrize("moment", [None, "node.configured", "node.loading", "node.bound"])
def test_sigterm_during_start_up_ends_the_daemon(world: World, program: str, moment: str | None) -> None:
    daemon = world.launch(program, name="early")
    if moment is not None:
        world.wait_for_log(daemon, moment)
    # Before its handlers are there the signal's own action, then a drain of nothing.
    assert _signalled(world, daemon) in (-signal.SIGTERM, 0)
    assert "Traceback" not in "\n".join(daemon.complaints)


@pytest.mark.parametrize("program", ["prefill_node", "decode_node"])
def test_sigterm_while_a_model_loads_for_ever_ends_the_daemon(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    (tmp_path / "torch.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    daemon = world.launch(program, "--backend", "torch", name="early")
    world.wait_for_log(daemon, "node.bound")
    assert _signalled(world, daemon) == 0
    assert (daemon.output, daemon.logged("node.ready")) == ([], [])
    assert daemon.logged("node.stopped", reason="stopped while loading")
