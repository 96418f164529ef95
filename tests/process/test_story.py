"""A daemon that finds itself at fault leaves a story that plays again, and its partner goes on."""

import json
import stat
import subprocess
import sys
from pathlib import Path

from common.errors import ExitStatus
from tests.process.harness import ROOT, Daemon
from tests.process.world import PREFETCH, World, prompt_of


def replay(path: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tests.sim.replay_story", path]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)


def check_story(world: World, daemon: Daemon, reason: str, prompt_ids: list[int]) -> None:
    """The daemon has ended by its own fault; its story is private, says why, and plays again."""
    assert world.exit_of(daemon) == ExitStatus.INVARIANT
    path = Path(daemon.logged("story.written")[0]["path"])
    assert path.parent == world.directory
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    head = json.loads(text.splitlines()[0])
    assert (head["role"], head["place"]) == (daemon.role, "step")
    assert reason in head["reason"]
    assert head["flags"]["backend"] == "emulated"
    assert bytes(prompt_ids).decode() not in text
    assert b"".join(token_id.to_bytes(4, "little") for token_id in prompt_ids[:4]).hex() not in text
    run = replay(str(path))
    assert (run.returncode, run.stderr) == (0, ""), run.stdout
    assert run.stdout.splitlines()[-1] == "reproduced"
    assert head["reason"] in run.stdout.splitlines()[-2]
    assert daemon.files_left() == []
    # The world takes a broken invariant for a failure; this one was asked for, and nothing is left of it.
    world.daemons.remove(daemon)


def test_a_node_at_fault_leaves_a_story_and_its_partner_goes_on(world: World) -> None:
    place = ("--story-dir", str(world.directory))
    pair = world.pair(prefill=place, decode=(*PREFETCH, *place))
    prompt_ids = prompt_of(40)
    pair.check_job("first", prompt_ids)

    pair.prefill.spoil("step.ChunkComputed", "repeat")
    # Its record is out when the same answer comes again; the KV is read from the slab that it leaves.
    pair.check_job("second", prompt_ids)
    check_story(world, pair.prefill, "compute answered for a slot it does not have", prompt_ids)

    prefill = world.prefill(bind=pair.prefill.endpoint, name="next")
    world.wait_for_log(pair.decode, "session.opened", count=2)
    pair.check_job("third", prompt_ids)

    # The second token is the last; said twice, it comes for a lane that is free again.
    pair.decode.spoil("step.TokenSampled", "repeat")
    pair.client.submit("fourth", prompt_ids, max_tokens=2)
    check_story(world, pair.decode, "vacated", prompt_ids)
    assert world.status(prefill)["accepting"]
