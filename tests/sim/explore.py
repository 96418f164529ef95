"""Exhaustive exploration: every order of events, within a budget of faults, of the real cores.

Decides which states are reached and whether each of them is sound; run by the tests and, by
hand, as `python -m tests.sim.explore [--nightly]`. It must never pass over a state that it has not seen.

Breadth first over `World` without the codec, so that a path found to a violation is a shortest one. At each
state anything prompt may happen next: a delivery, an answer of compute, a job, a fault of the budget. Time
moves to the next deadline when nothing prompt is left. Apart from that the budget may hold leaps: the clock
of one process runs ahead to one of its deadlines while everything else still waits, so that each timeout
meets each state. Invariants are checked after every step by the cores and the world. And from every state
that was reached, without further faults, rest can be reached, where every slot is free and every job was
answered.

A partition ends before more than `WIRES_MAX` connections are open or undelivered: each attempt behind it adds
one that waits like the last.

Left out of the orders, because nothing can tell the difference:

- Messages between a client and the decode node arrive at once. A client only records what it is told; a job
  or a cancel that arrives later is one that was sent later, which is explored.
- With `eager` the text thread answers at once. A slot, a lane or a session never waits for it, since no job
  here has stop strings; what it delays is the moment at which a job comes to the queue, which is explored as
  a later SUBMIT, and its last answer, when it holds nothing any more.
- With `eager` compute takes a command as soon as it is given, and begins a chunk at once. The loop cannot
  see when that happens, only what lies in the mailbox and in which order; answers are taken at any later
  time, and what compute had done before it saw the command is what it did before the command was given.
  Reads and the second write of a chunk come at any time.
- With `eager` a node that died is started again before anything else. To the others that is the same: they
  learn of it from their connections, at any time.

Scenarios whose faults strike compute or text themselves do without `eager`.
"""

import argparse
import gc
import resource
import sys
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from common.errors import ExitStatus, InvariantViolation
from tests.sim import faults
from tests.sim.canonical import key
from tests.sim.client_process import ClientProcess
from tests.sim.decode_process import DecodeProcess
from tests.sim.explore_clone import clone_of, unbind
from tests.sim.explore_scenarios import CI, GENERAL, NIGHTLY, Scenario, scenario
from tests.sim.plan import NEVER_MS, Option
from tests.sim.world import World

PROMPT_STEPS_MAX = 200
_WRONG = (InvariantViolation, AssertionError, LookupError, AttributeError, TypeError, ValueError)
WIRES_MAX = 6


class Violation(AssertionError):
    """A path that leads to a broken invariant; the text holds it, ready for `replay`."""

    def __init__(self, scenario: "Scenario", path: list[Option], what: str) -> None:
        steps = ",\n    ".join(map(repr, path))
        super().__init__(f"{what}\nreplay(scenario({scenario.name!r}), [\n    {steps},\n])")
        self.path = path


@dataclass(slots=True)
class Reached:
    """What an exploration went through. complete: to the end, not stopped at `states_max`."""

    states: int = 0
    edges: int = 0
    depth: int = 0
    rests: int = 0
    seconds: float = 0.0
    complete: bool = True


@dataclass(slots=True)
class _Graph:
    """How each state was first reached, and which steps without a fault lead where."""

    parents: array = field(default_factory=lambda: array("l"))
    options: list[Option | None] = field(default_factory=list)
    sources: array = field(default_factory=lambda: array("l"))
    targets: array = field(default_factory=lambda: array("l"))
    at_rest: list[int] = field(default_factory=list)

    def add(self, parent: int, option: Option | None) -> int:
        self.parents.append(parent)
        self.options.append(option)
        return len(self.parents) - 1

    def path(self, number: int) -> list[Option]:
        path = []
        while self.options[number] is not None:
            path.append(self.options[number])
            number = self.parents[number]
        return path[::-1]


class Exploration:
    """One scenario, explored from a pair at rest."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.reached = Reached()
        self._graph = _Graph()
        self._seen: dict[tuple[int, int], int] = {}

    def complete(self) -> Reached:
        """Explore to the end. Raises Violation."""
        # Worlds that are dropped hold no cycles: `unbind` has cut them.
        gc.disable()
        try:
            return self._complete()
        finally:
            gc.enable()

    def _complete(self) -> Reached:
        started_s = _used_s()
        first = self._graph.add(-1, None)
        try:
            world = start(self.scenario)
        except _WRONG as error:
            raise self._violation(first, None, f"at the start: {error}") from error
        self._seen[_digest(world)] = first
        layer: list[tuple[int, World]] = [(first, world)]
        while layer:
            following: list[tuple[int, World]] = []
            for number, reached in layer:
                following += self._expand(number, reached)
            layer = following
            self.reached.depth += bool(layer)
            if self.scenario.states_max is not None and len(self._seen) >= self.scenario.states_max:
                self.reached.complete = False
                break
        self.reached.states = len(self._seen)
        if self.reached.complete:
            self._demand_rest()
        self.reached.seconds = _used_s() - started_s
        return self.reached

    def _expand(self, number: int, world: World) -> Iterator[tuple[int, World]]:
        """The states that follow and are new."""
        graph = self._graph
        usual, faulty = choices(world, self.scenario)
        if usual == [TIME] and world.quiescent():
            self._rest(number, world)
        for place, option in enumerate(usual + faulty):
            last = place + 1 == len(usual) + len(faulty)
            following = world if last else clone_of(world)
            self._take(number, following, option)
            self.reached.edges += 1
            digest = _digest(following)
            target = self._seen.get(digest)
            if target is None:
                target = self._seen[digest] = graph.add(number, option)
                yield target, following
            else:
                unbind(following)
            if place < len(usual):
                graph.sources.append(number)
                graph.targets.append(target)

    def _take(self, number: int, world: World, option: Option) -> None:
        try:
            take(world, option, self.scenario)
        except _WRONG as error:
            raise self._violation(number, option, f"{type(error).__name__}: {error}") from error

    def _violation(self, number: int, option: Option | None, what: str) -> Violation:
        path = self._graph.path(number) + ([] if option is None else [option])
        return Violation(self.scenario, path, what)

    def _rest(self, number: int, world: World) -> None:
        self._graph.at_rest.append(number)
        self.reached.rests += 1
        try:
            world.audit.final(world)
        except InvariantViolation as error:
            raise self._violation(number, None, str(error)) from error

    def _demand_rest(self) -> None:
        """From every state there is a way to rest on which no fault happens."""
        graph = self._graph
        before: list[list[int]] = [[] for _ in graph.parents]
        for source, target in zip(graph.sources, graph.targets, strict=True):
            before[target].append(source)
        calm = set(graph.at_rest)
        waiting = deque(calm)
        while waiting:
            for source in before[waiting.popleft()]:
                if source not in calm:
                    calm.add(source)
                    waiting.append(source)
        if len(calm) < len(graph.parents):
            lost = next(number for number in range(len(graph.parents)) if number not in calm)
            raise self._violation(lost, None, "INV-7: no rest can be reached any more")


TIME = Option("time")


def start(scenario: Scenario) -> World:
    """The world with all sessions open and nothing to do."""
    world = World(scenario.plan)
    world.leaps, world.faults_left = scenario.leaps, scenario.faults_max
    for _ in range(PROMPT_STEPS_MAX):
        prompt = world.prompt_options()
        if not prompt and _connected(world):
            return world
        world.take(prompt[0] if prompt else TIME)
    raise AssertionError("the pair does not come to a session")


def _connected(world: World) -> bool:
    workers = [worker for node in world.decodes for worker in node.core.workers]
    return all(worker.usable for worker in workers) and all(client.session for client in world.clients)


def choices(world: World, scenario: Scenario) -> tuple[list[Option], list[Option]]:
    """What can happen next without a fault, and with one."""
    usual = world.prompt_options()
    if not usual and world.next_due_ms() < NEVER_MS and len(world.wires) < WIRES_MAX:
        usual = [TIME]
    usual += _submits(world)
    repairs = faults.repairs(world)
    if not world.faults_left:
        return usual + repairs, []
    faulty = [option for option in faults.options(world)[len(repairs) :] if not _is_twin(world, option)]
    return usual + repairs, faulty + _leaps(world, scenario)


def _is_twin(world: World, option: Option) -> bool:
    """A crash after which everything sent still arrives, when nothing is on its way."""
    if not option.kind.startswith("crash") or option.detail == 0:
        return False
    name = option.where
    return not any(
        wire.down if wire.router == name else wire.up
        for wire in (*world.wires.values(), *world.bulk.values())
        if name in (wire.router, wire.dealer)
    )


def _submits(world: World) -> list[Option]:
    return [Option("submit", client.name) for client in world.clients if world.may_submit(client)]


def take(world: World, option: Option, scenario: Scenario) -> None:
    """Let one thing happen, and what follows at once; raises when it should not have been possible."""
    world.faults_left -= option.kind == "leap" or option.kind in faults.FAULTS
    if option.kind == "leap":
        _leap(world, option)
    else:
        world.take(option)
    for _ in range(PROMPT_STEPS_MAX):
        found = world.prompt_options() + _submits(world)
        eager = next((item for item in found if _is_eager(world, item, scenario)), None)
        if eager is None:
            hung = world.audit.statuses[ExitStatus.HUNG] > 0
            world.audit.that(scenario.may_hang or not hung, "a node hung though nothing had held it up")
            return
        world.take(eager)
    raise AssertionError("messages go round and round")


def replay(scenario: Scenario, path: list[Option]) -> World:
    """The world at the end of a path; raises what the last step raises."""
    world = start(scenario)
    for option in path:
        take(world, option, scenario)
    return world


def _is_eager(world: World, option: Option, scenario: Scenario) -> bool:
    if option.kind in ("deliver_up", "deliver_down"):
        return isinstance(world.processes[world.wires[int(option.where)].dealer], ClientProcess)
    if option.kind == "submit":
        return scenario.at_once
    if not scenario.eager:
        return False
    if option.kind == "compute":
        node = world.processes[option.where]
        return bool(node.device.commands) if isinstance(node, DecodeProcess) else not node.begun
    return option.kind in ("text", "restart")


def _deadlines(process: Any) -> list[int | None]:
    """Of a node's core and of its sessions."""
    sessions = [process.stack.listener]
    if isinstance(process, DecodeProcess):
        sessions += process.stack.connectors.values()
    else:
        sessions += process.stack.senders.values()
    dues = [item.deadline_ms() for item in sessions]
    return [process.core.deadline_ms(), min((due for due in dues if due is not None), default=None)]


def _leaps(world: World, scenario: Scenario) -> list[Option]:
    """Clocks that may run ahead: to a deadline of the core (0) or of the sessions (1)."""
    if not world.leaps:
        return []
    found = []
    for node in (*world.prefills, *world.decodes):
        if node.runs:
            for which, due_ms in enumerate(_deadlines(node)):
                possible = due_ms is not None and which in scenario.leaps_to
                if possible and node.local_ms(world.now_ms) < due_ms < NEVER_MS:
                    found.append(Option("leap", node.name, which))
    return found


def _leap(world: World, option: Option) -> None:
    world.leaps -= 1
    node = world.processes[option.where]
    node.offset_ms -= _deadlines(node)[option.detail] - node.local_ms(world.now_ms)
    node.tick(world)
    for due_ms in _deadlines(node):
        late = node.runs and due_ms is not None and due_ms <= node.local_ms(world.now_ms)
        world.audit.that(not late, f"{node.name} has looked at its clock and left a deadline in the past")


def _used_s() -> float:
    """Processor time of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def _digest(world: World) -> tuple[int, int]:
    form = key(world)
    return hash(form[::2]), hash(form[1::2])


def main(arguments: list[str]) -> int:
    """Explore and report, one line per scenario."""
    parser = argparse.ArgumentParser(description="exhaustive exploration of the real cores")
    parser.add_argument("--nightly", action="store_true", help="the larger scenarios too")
    parser.add_argument("--only", type=scenario, action="append", help="a scenario by its name")
    options = parser.parse_args(arguments)
    for item in options.only or (*GENERAL, *CI, *(NIGHTLY if options.nightly else ())):
        try:
            sys.stdout.write(f"{item.name}: {Exploration(item).complete()}\n")
        except Violation as violation:
            sys.stdout.write(f"{item.name}: VIOLATION {violation}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
