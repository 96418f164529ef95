"""A run told step by step, for people who look for what went wrong."""

from collections.abc import Iterator
from typing import Any

from tests.sim.audit import source_slots, workers
from tests.sim.plan import Option
from tests.sim.runs import Run
from tests.sim.world import World
from transport.codec import decode

_TEXT_CHARACTERS = 150


def told_run(seed: int) -> Iterator[str]:
    """The run of a seed. Raises SimulationFailed at its end, as the run does."""
    run = Run(seed)
    yield f"plan: {run.plan}"
    lines: list[str] = []
    take = run.world.take

    def telling_take(option: Option) -> None:
        line = f"{run.world.now_ms:6} {_told(option, run.world)}"
        lines.append(line)
        take(option)
        lines.append(f"       {_state(run.world)}")

    run.world.take = telling_take
    try:
        outcome = run.complete()
    finally:
        yield from _without_repeats(lines)
    yield f"ended well: {outcome}"


def _told(option: Option, world: World) -> str:
    if option.kind == "deliver_up":
        wire = world.wires[int(option.where)]
        return f"{wire.dealer} -> {wire.router} [{wire.number}] {_message(wire.up[0])}"
    if option.kind == "deliver_down":
        wire = world.wires[int(option.where)]
        what = _message(wire.down[0]) if wire.down else "disconnected"
        return f"{wire.router} -> {wire.dealer} [{wire.number}] {what}"
    words = [option.kind, option.where, *(str(number) for number in option[2:] if number)]
    if option.kind == "mail":
        words.append(str(world.processes[option.where].device.mailbox[0]))
    return " ".join(words)


def _message(item: Any) -> str:
    if isinstance(item, list):
        header, message = decode(item)
        session, sequence = header.session, header.sequence
    else:
        session, sequence, message = item
    return f"{session}#{sequence} {str(message)[:_TEXT_CHARACTERS]}"


def _state(world: World) -> str:
    parts = []
    for node in world.decodes:
        if not node.alive:
            parts.append(f"{node.name} down")
            continue
        core = node.core
        jobs = " ".join(f"{job.label}:{job.state}" for job in core.desk.live())
        lanes = " ".join(str(lane.state) for lane in core.lanes)
        slots = " ".join(
            f"{slot.index}:{slot.state}" for worker in workers(node) for slot in worker.ledger.slots()
        )
        parts.append(f"{node.incarnation} jobs [{jobs}] lanes [{lanes}] slots [{slots}]")
    for node in world.prefills:
        sources = " ".join(str(slot.state) for slot in source_slots(node))
        parts.append(f"{node.incarnation} [{sources}]" if node.alive else f"{node.name} down")
    return "; ".join(parts)


def _without_repeats(lines: list[str]) -> Iterator[str]:
    """State lines only where the state has changed."""
    state = ""
    for line in lines:
        if line.startswith("       "):
            if line == state:
                continue
            state = line
        yield line
