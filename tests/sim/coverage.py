"""What a set of runs has gone through: legal pairs of the tables, and what each fault met.

`watching` counts every transition that the cores make, by wrapping the `advance` they look up; a `Coverage`
also counts, for each fault, the states of jobs, slots, sources and lanes at its moment.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import decode_node.jobs
import decode_node.lanes
import decode_node.slots
import prefill_node.production
from common import lifecycle
from tests.sim import faults
from tests.sim.audit import source_slots, workers
from tests.sim.plan import Option

if TYPE_CHECKING:
    from tests.sim.world import World

TABLES = {
    "slot": lifecycle.SLOT_TRANSITIONS,
    "source": lifecycle.SOURCE_TRANSITIONS,
    "lane": lifecycle.LANE_TRANSITIONS,
    "job": lifecycle.JOB_TRANSITIONS,
}
_STATES = {
    "slot": lifecycle.SlotState,
    "source": lifecycle.SourceState,
    "lane": lifecycle.LaneState,
    "job": lifecycle.JobState,
}
# By (fault, thing, state); an empty fault stands for all of them.
IMPOSSIBLE = {
    ("", "job", "ended"): "an ended job is forgotten in the same step",
}
_USERS = (decode_node.jobs, decode_node.lanes, decode_node.slots, prefill_node.production)
_real_advance = lifecycle.advance


class Coverage:
    """pairs: by (table, state, event). cells: by (fault, kind of thing, its state)."""

    def __init__(self) -> None:
        self.pairs: Counter[tuple[str, str, str]] = Counter()
        self.cells: Counter[tuple[str, str, str]] = Counter()

    def add(self, other: "Coverage") -> None:
        self.pairs.update(other.pairs)
        self.cells.update(other.cells)

    def fault(self, option: Option, world: "World") -> None:
        """A fault is about to happen: note what it meets."""
        name = option.kind
        for thing, state in _met(option, world):
            self.cells[name, thing, state] += 1


def _met(option: Option, world: "World") -> set[tuple[str, str]]:
    """States that the fault meets: of the cancelled job alone, of everything otherwise."""
    met: set[tuple[str, str]] = set()
    for decode in world.decodes:
        if not decode.alive:
            continue
        desk = decode.core.desk
        if option.kind == "cancel":
            client = world.processes[option.where]
            job_id = desk.clients.job_id(client.session, f"job{option.detail}")
            job = None if job_id is None else desk.get(job_id)
            met.update([("job", str(job.state))] if job is not None else [])
            continue
        met.update(("job", str(job.state)) for job in desk.live())
        met.update(("lane", str(lane.state)) for lane in decode.core.lanes)
        for worker in workers(decode):
            slots = (*worker.ledger.slots(), *worker.ledger.survivors())
            met.update(("slot", str(slot.state)) for slot in slots)
    if option.kind != "cancel":
        for prefill in world.prefills:
            met.update(("source", str(slot.state)) for slot in source_slots(prefill) if prefill.alive)
    return met


def all_pairs() -> list[tuple[str, str, str]]:
    """Every legal (table, state, event)."""
    return [(name, str(state), str(event)) for name, table in TABLES.items() for state, event in table]


def all_cells() -> list[tuple[str, str, str]]:
    """Every (fault, thing, state). A cancel meets its own job alone."""
    return [
        (name, thing, str(state))
        for name in faults.NAMES
        for thing, states in _STATES.items()
        for state in states
        if name != "cancel" or thing == "job"
    ]


def possible_cells() -> list[tuple[str, str, str]]:
    """Those that can happen."""
    return [cell for cell in all_cells() if why_impossible(*cell) is None]


def why_impossible(fault: str, thing: str, state: str) -> str | None:
    """Why a fault cannot meet a state, if it cannot."""
    return IMPOSSIBLE.get((fault, thing, state)) or IMPOSSIBLE.get(("", thing, state))


class _Counting:
    """The table look-up, counted."""

    def __init__(self, pairs: Counter[tuple[str, str, str]]) -> None:
        self._pairs = pairs
        self._names = {id(table): name for name, table in TABLES.items()}

    def __call__(self, table: Any, state: Any, event: Any) -> Any:
        following = _real_advance(table, state, event)
        self._pairs[self._names[id(table)], str(state), str(event)] += 1
        return following


@contextmanager
def watching(coverage: Coverage) -> Iterator[None]:
    """Count the transitions of every core in this process."""
    counting = _Counting(coverage.pairs)
    for module in _USERS:
        module.advance = counting
    try:
        yield
    finally:
        for module in _USERS:
            module.advance = _real_advance


def least_covered(coverage: Coverage, number: int = 5) -> list[tuple[str, int]]:
    """The pairs and cells that were hit least, those that cannot happen left out."""
    counts = [(" ".join(name), coverage.pairs[name]) for name in all_pairs()]
    counts += [(" ".join(name), coverage.cells[name]) for name in possible_cells()]
    return sorted(counts, key=lambda item: item[1])[:number]
