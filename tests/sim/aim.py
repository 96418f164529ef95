"""Faults that find their moment too seldom by themselves.

Decides what a seeded run may do on purpose: what goes wrong in work, a stop in the middle of a copy, and what
meets a state that does not last. Asked by `tests.sim.runs`; it must never change a world.
"""

from common.lifecycle import JobState, LaneState, SlotState, SourceState
from tests.sim import faults, faults_bulk
from tests.sim.choices import Choices
from tests.sim.plan import Option
from tests.sim.world import World

_LANES = (LaneState.DECODING, LaneState.PREFILLING, LaneState.STOPPING)
_SOURCES = (SourceState.ABANDONED, SourceState.QUEUED)
# Some oftener than others: what needs two pieces on their way, or one that is wanted.
_OF_BULK = (*faults_bulk.FAULTS, "bulk_overtake", "bulk_overtake", "corrupt_piece")
_OF_PIECES = ("bulk_overtake", "corrupt_piece")
_OF_TEXT = ("text_error",)
_SELDOM = ("late_completion", "late_request", "compute_error", "text_error", "hung_compute", "short_record")
_BUSY_SHARE = 0.6
_WAITING_SHARE = 0.25
_ANY_SHARE = 0.25


def in_work(world: World) -> list[Option]:
    """What goes wrong in work, and a cancel of any job."""
    found: list[Option] = []
    if world.budget.get("slow_compute", 0) > 0:
        slow = faults.FAULTS["slow_compute"].find(world)
        found += [option for option in slow if option.where[0] == "p"]
    for name in ("text_error", "short_record", "cancel"):
        if world.budget.get(name, 0) > 0:
            found += faults.FAULTS[name].find(world)
    return found


def in_copy(world: World) -> list[Option]:
    """Decode nodes to be stopped in the middle of a copy, while another one may get the slot."""
    if len(world.decodes) == 1 or world.budget.get("stop_decode", 0) < 1:
        return []
    return [Option("stop_decode", node.name) for node in world.decodes if node.runs and node.device.filling]


def to_hurry(world: World) -> list[Option]:
    """Prompts that lanes come to wait for while another one is computed: seldom by itself, legal always."""
    found = []
    for prefill in world.prefills:
        computing = prefill.core.line.computing if prefill.alive else None
        if computing is None or computing.production is None or computing.production.urgent:
            continue
        found += [
            Option("hurry", decode.name, number, slot.index)
            for decode in world.decodes
            if decode.runs
            for number, worker in enumerate(decode.core.workers)
            for slot in worker.ledger.slots()
            if slot.session != computing.session or slot.index != computing.index
            if slot.state is SlotState.PRODUCING and not slot.urgent
        ]
    return found


def in_passing(world: World, choices: Choices) -> list[Option]:
    """What meets too seldom: a fault of a bulk connection and busy lanes or slots; any fault and the last
    words of a job or the last sends of a slot; a few and a lane that decodes."""
    lanes = {lane.state for decode in world.decodes for lane in decode.core.lanes}
    jobs = {job.state for decode in world.decodes for job in decode.core.desk.live()}
    sources = {slot.state for prefill in world.prefills for slot in prefill.core.grants}
    busy, passes = not lanes.isdisjoint(_LANES), not sources.isdisjoint(_SOURCES)
    stops = LaneState.STOPPING in lanes or SourceState.ABANDONED in sources
    ends, sends = JobState.FLUSHING in jobs, SourceState.SENDING in sources
    kinds: list[tuple[str, ...]] = []
    if world.bulk:
        waits = LaneState.IMPORTING in lanes or JobState.PREFILLED in jobs or _has_orphans(world)
        often = stops or ends or (busy and choices.chance(_BUSY_SHARE))
        if often or ((passes or waits) and choices.chance(_WAITING_SHARE)):
            kinds.append(_OF_BULK)
            kinds += [_OF_PIECES] * (stops or waits)
    if choices.chance(_ANY_SHARE):
        kinds += [tuple(faults.FAULTS)] * (ends or sends) + [_SELDOM] * (busy or passes or sends)
        kinds += [_OF_TEXT] * (passes or sends)
    names = [name for name in choices.one_of(kinds) if world.budget.get(name, 0) > 0] if kinds else []
    return faults.FAULTS[choices.one_of(names)].find(world) if names else []


def _has_orphans(world: World) -> bool:
    return any(worker.orphans for decode in world.decodes for worker in decode.core.workers)
