"""Exhaustive exploration in CI, and what it stands on: copies share nothing, keys forget nothing."""

import subprocess
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

import pytest

from common.errors import InvariantViolation
from tests.sim import explore
from tests.sim.canonical import key
from tests.sim.explore import TIME, Exploration, Violation, choices, replay, start, take
from tests.sim.explore_clone import clone_of, slots_of
from tests.sim.explore_fields import DURATIONS, EXCLUDED, INSTANTS, RELEVANT_MS
from tests.sim.explore_scenarios import CI, LONG, SHORT, Scenario, faulty, over_tcp
from tests.sim.mutants import ROOT
from tests.sim.plan import Option
from tests.sim.world import World

ATOMS = (int, float, str, bytes, type, Enum, FunctionType, type(None))


@pytest.fixture(scope="module")
def explored() -> dict[str, str]:
    """What each scenario came to, explored in processes of their own, two at a time."""
    names = [scenario.name for scenario in CI]
    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(names, pool.map(explore_apart, names), strict=True))


def explore_apart(name: str) -> str:
    command = [sys.executable, "-m", "tests.sim.explore", "--only", name]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("name", [scenario.name for scenario in CI])
def test_every_order_of_events_keeps_the_invariants_and_leads_to_rest(
    name: str, explored: dict[str, str]
) -> None:
    assert "complete=True" in explored[name], explored[name]


def middle_of(scenario: Scenario) -> World:
    """A world with two jobs under way, one of them in a lane."""
    world = start(scenario)
    for _ in range(200):
        lanes = [lane for node in world.decodes for lane in node.core.lanes if lane.job_id is not None]
        jobs = [job for node in world.decodes for job in node.core.desk.live()]
        if lanes and len(jobs) == 2:
            return world
        usual, _ = choices(world, scenario)
        submits = [option for option in usual if option.kind == "submit"]
        take(world, (submits or usual)[0], scenario)
    raise AssertionError("two jobs are never under way")


BUSY = faulty("busy", LONG, SHORT, cancel=1)


@pytest.fixture(params=[BUSY, over_tcp(BUSY)], ids=["shm", "tcp"])
def busy(request: pytest.FixtureRequest) -> World:
    return middle_of(request.param)


def reachable(thing: Any, found: dict[int, Any]) -> dict[int, Any]:
    """Every object that can be reached, values that cannot change left out."""
    if (
        isinstance(thing, (int, float, str, bytes, type, Enum, FunctionType, type(None)))
        or id(thing) in found
    ):
        return found
    found[id(thing)] = thing
    if isinstance(thing, dict):
        inner = list(thing.values())
    elif isinstance(thing, (list, tuple, deque, set, frozenset)):
        inner = list(thing)
    elif isinstance(thing, MethodType):
        inner = [thing.__self__]
    else:
        inner = [getattr(thing, name) for name in attribute_names(thing)]
    for item in inner:
        reachable(item, found)
    return found


def attribute_names(thing: Any) -> list[str]:
    return list(slots_of(type(thing)) or vars(thing))


def is_mutable(thing: Any) -> bool:
    parameters = getattr(thing, "__dataclass_params__", None)
    frozen = parameters is not None and parameters.frozen
    return not frozen and not isinstance(thing, (tuple, frozenset, MethodType, Enum))


def inside_frozen(world: World) -> set[int]:
    """Containers that only frozen messages hold: nobody changes those."""
    frozen = [thing for thing in reachable(world, {}).values() if not is_mutable(thing)]
    return {id(item) for thing in frozen for item in reachable(thing, {}).values() if type(item) is dict}


def test_a_clone_shares_nothing_that_can_change(busy: World) -> None:
    copied = reachable(clone_of(busy), {})
    shared = [
        thing
        for number, thing in reachable(busy, {}).items()
        if number in copied and is_mutable(thing) and number not in inside_frozen(busy)
    ]
    assert shared == []
    assert len(copied) > 100


def test_what_is_done_to_a_clone_is_not_seen_by_its_original(busy: World) -> None:
    before, scenario = key(busy), BUSY
    copied = clone_of(busy)
    assert key(copied) == before
    for _ in range(60):
        usual, _ = choices(copied, scenario)
        take(copied, usual[0], scenario)
    assert key(busy) == before
    assert key(copied) != before


def test_a_closure_is_refused_rather_than_shared() -> None:
    count = 1
    with pytest.raises(TypeError):
        clone_of([lambda: count])


def changed(value: Any, world: World) -> Any:
    """Another value of the same kind."""
    if isinstance(value, str) and value in world.processes:
        return next(name for name in world.processes if name != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, Enum):
        return next(other for other in type(value) if other is not value)
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return value + b"x" if isinstance(value, bytes) else None


def plain_attributes(world: World) -> list[tuple[Any, str]]:
    """Attributes of the product's objects that hold one plain value."""
    things = [
        thing for thing in reachable(world, {}).values() if is_mutable(thing) and type(thing) in EXCLUDED
    ]
    return [
        (thing, name)
        for thing in things
        for name in attribute_names(thing)
        if isinstance(getattr(thing, name), (int, str, bytes, Enum))
    ]


def test_every_attribute_is_in_the_key_or_left_out_by_name(busy: World) -> None:
    before = key(busy)
    forgotten = []
    for thing, name in plain_attributes(busy):
        if name in EXCLUDED[type(thing)]:
            continue
        value = getattr(thing, name)
        relevant = RELEVANT_MS.get((type(thing), name))
        setattr(thing, name, changed(value, busy))
        if key(busy) == before and (relevant is None or relevant(thing)):
            forgotten.append(f"{type(thing).__name__}.{name}")
        setattr(thing, name, value)
    assert forgotten == []
    assert key(busy) == before


def test_no_name_is_left_out_that_no_longer_exists(busy: World) -> None:
    known: dict[type, set[str]] = {}
    for thing in reachable(busy, {}).values():
        if type(thing) in EXCLUDED:
            known.setdefault(type(thing), set()).update(attribute_names(thing))
    stale = [(cls.__name__, name) for cls in known for name in EXCLUDED[cls] if name not in known[cls]]
    assert stale == []


def test_every_instant_of_the_product_is_known_as_one(busy: World) -> None:
    """A raw instant in a key would make every moment a state of its own."""
    unknown = {
        name
        for thing, name in plain_attributes(busy)
        if name.endswith("_ms") and name not in EXCLUDED[type(thing)] and name not in INSTANTS | DURATIONS
    }
    assert unknown == set()


def settle(world: World, scenario: Scenario) -> None:
    """Until nothing but time can happen and the pair has a session."""
    for _ in range(200):
        usual, _ = choices(world, scenario)
        if all(option.kind in ("submit", "time") for option in usual) and world.decodes[0].core.accepting:
            return
        take(world, TIME if usual[0].kind == "submit" else usual[0], scenario)
    raise AssertionError("the pair does not settle")


@pytest.mark.parametrize("over", [lambda scenario: scenario, over_tcp], ids=["shm", "tcp"])
def test_a_pair_that_has_connected_anew_is_where_it_was(over: Callable[[Scenario], Scenario]) -> None:
    """Sessions, attempts, sequence numbers and the clock differ; what may happen does not."""
    scenario = over(faulty("anew", SHORT, second_session=1))
    world = start(scenario)
    sessions, keys = set(), set()
    for _ in range(3):
        take(world, Option("second_session", "d0", 0), scenario)
        settle(world, scenario)
        take(world, TIME, scenario)  # a PONG shows that the session works, and back-off begins anew
        settle(world, scenario)
        world.budget, world.faults_left = dict(scenario.plan.faults), scenario.faults_max
        sessions.add(world.decodes[0].core.workers.get("p0").session)
        keys.add(key(world))
    assert (len(sessions), len(keys)) == (3, 1)
    take(world, Option("submit", "c0"), scenario)
    assert key(world) not in keys


def test_a_violation_names_a_shortest_path_that_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_but_never_import(world: World, option: Option, scenario: Scenario) -> None:
        take(world, option, scenario)
        states = [lane.state for node in world.decodes for lane in node.core.lanes]
        if "importing" in states:
            raise InvariantViolation("a lane imports")

    monkeypatch.setattr(explore, "take", take_but_never_import)
    scenario = faulty("planted", SHORT, cancel=1)
    with pytest.raises(Violation, match="a lane imports") as caught:
        Exploration(scenario).complete()
    path = caught.value.path
    assert all(repr(option) in str(caught.value) for option in path)
    assert "cancel" not in {option.kind for option in path}
    with pytest.raises(InvariantViolation):
        replay(scenario, path)
    assert replay(scenario, path[:-1]).audit.answers == {}
