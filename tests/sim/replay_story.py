"""Play the story of a node that broke an invariant: `python -m tests.sim.replay_story FILE`.

Decides whether the file reproduces what it reports. The stack is built from the written state, stepped with
the written events, and checked after each step. Exit status 0: it ended as recorded, 1: it did not, 2: the
file cannot be read. Classes are taken from `CLASSES` alone; nothing in a file is imported, called by name or
evaluated. A file of another version of Tandem may read well and play differently.
"""

import json
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import common.client_messages
import common.digests
import common.errors
import common.kv_convert
import common.kv_layout
import common.lifecycle
import common.messages
import common.prefix_commands
import common.prefix_index
import common.sampling
import decode_node.affinity
import decode_node.cache_orders
import decode_node.clients
import decode_node.commands
import decode_node.compute_watch
import decode_node.core
import decode_node.desk
import decode_node.events
import decode_node.handoff
import decode_node.jobs
import decode_node.lane_work
import decode_node.lanes
import decode_node.pace
import decode_node.prefix_cache
import decode_node.record
import decode_node.scheduler
import decode_node.settings
import decode_node.slots
import decode_node.stack
import decode_node.timers
import decode_node.worker
import decode_node.workers
import prefill_node.core
import prefill_node.events
import prefill_node.grants
import prefill_node.line
import prefill_node.production
import prefill_node.stack
import transport.bulk
import transport.connector
import transport.listener
import transport.peers
from common.story import FORMAT, ending_of, reason_of
from common.story_form import name_of
from common.version import VERSION

MODULES: tuple[ModuleType, ...] = (
    common.client_messages,
    common.digests,
    common.errors,
    common.kv_convert,
    common.kv_layout,
    common.lifecycle,
    common.messages,
    common.prefix_commands,
    common.prefix_index,
    common.sampling,
    decode_node.affinity,
    decode_node.cache_orders,
    decode_node.clients,
    decode_node.commands,
    decode_node.compute_watch,
    decode_node.core,
    decode_node.desk,
    decode_node.events,
    decode_node.handoff,
    decode_node.jobs,
    decode_node.lane_work,
    decode_node.lanes,
    decode_node.pace,
    decode_node.prefix_cache,
    decode_node.record,
    decode_node.scheduler,
    decode_node.settings,
    decode_node.slots,
    decode_node.stack,
    decode_node.timers,
    decode_node.worker,
    decode_node.workers,
    prefill_node.core,
    prefill_node.events,
    prefill_node.grants,
    prefill_node.line,
    prefill_node.production,
    prefill_node.stack,
    transport.bulk,
    transport.connector,
    transport.listener,
    transport.peers,
)


def _classes_of(module: ModuleType) -> Iterator[type]:
    return (
        item
        for item in vars(module).values()
        if isinstance(item, type) and item.__module__ == module.__name__
    )


CLASSES: dict[str, type] = {name_of(cls): cls for module in MODULES for cls in _classes_of(module)}
BLANK_LENGTH_MAX = 16 * 2**20
_BLANKS: dict[str, Callable[[int], Any]] = {
    "bytes": bytes,
    "str": lambda length: "x" * length,
    "tuple": lambda length: (0,) * length,
    "list": lambda length: [0] * length,
    "dict": lambda length: {f"key-{number}": 0 for number in range(length)},
}
_CONTAINERS: dict[str, Callable[[], Any]] = {
    "list": list,
    "deque": deque,
    "set": set,
    "dict": dict,
    "ordered": OrderedDict,
}


class UnreadableStory(Exception):
    """The file is no story that this version can play."""


class Reader:
    """Builds values from their written form; the counterpart of `common.story_form.Form`."""

    def __init__(self, source: Callable[..., Any]) -> None:
        """source: stands in for every function from outside."""
        self._source = source
        self._built: dict[int, Any] = {}

    def value(self, plain: Any) -> Any:
        """Raises `UnreadableStory`."""
        if not isinstance(plain, dict):
            return plain
        if "ref" in plain:
            return self._built[plain["ref"]]
        tag = next(iter(plain))
        match tag:
            case "tuple":
                return tuple(self.value(item) for item in plain["tuple"])
            case "bytes":
                return bytes.fromhex(plain["bytes"])
            case "blank":
                return self._blank(plain)
            case "enum":
                return self._class(plain["enum"], Enum)[plain["name"]]
            case "class":
                return self._class(plain["class"])
            case "new":
                return self._filled(self._class(plain["new"]), plain["with"])
            case "object":
                return self._object(plain)
            case "method":
                return self._method(plain)
            case "source":
                return self._source
        if tag in _CONTAINERS:
            return self._container(tag, plain)
        raise UnreadableStory(f"it holds something that cannot be rebuilt: {plain}"[:200])

    def _class(self, name: str, base: type = object) -> type:
        cls = CLASSES.get(name)
        if cls is None or not issubclass(cls, base):
            raise UnreadableStory(f"it names {name}, which is not in the list of classes")
        return cls

    def _filled(self, cls: type, fields: dict[str, Any], empty: Any = None) -> Any:
        value = cls.__new__(cls) if empty is None else empty
        for name, item in fields.items():
            object.__setattr__(value, name, self.value(item))
        return value

    def _object(self, plain: dict[str, Any]) -> Any:
        cls = self._class(plain["object"])
        empty = self._built[plain["id"]] = cls.__new__(cls)
        return self._filled(cls, plain["with"], empty)

    def _container(self, tag: str, plain: dict[str, Any]) -> Any:
        built = self._built[plain["id"]] = _CONTAINERS[tag]()
        if isinstance(built, dict):
            for key, item in plain[tag]:
                built[self.value(key)] = self.value(item)
        elif isinstance(built, set):
            built.update(self.value(item) for item in plain[tag])
        else:
            built.extend(self.value(item) for item in plain[tag])
        return built

    def _method(self, plain: dict[str, Any]) -> MethodType:
        holder = self.value(plain["of"])
        function = getattr(type(holder), plain["method"], None)
        if type(holder) not in CLASSES.values() or not isinstance(function, FunctionType):
            raise UnreadableStory(f"{type(holder).__name__} has no method {plain['method']}")
        return MethodType(function, holder)

    @staticmethod
    def _blank(plain: dict[str, Any]) -> Any:
        kind, length = plain["blank"], plain["length"]
        if kind not in _BLANKS or not 0 <= length <= BLANK_LENGTH_MAX:
            raise UnreadableStory(f"a blank {kind} of length {length}")
        return _BLANKS[kind](length)


@dataclass(frozen=True, slots=True)
class Violation:
    """What broke after how many steps. place: `step`, `check` or `outside` of the stack."""

    place: str
    reason: str
    steps: int


@dataclass(slots=True)
class Replay:
    """A story as it was read, and what came of it. `effects` is what the last step asked for."""

    head: dict[str, Any]
    stack: Any
    steps: list[tuple[Any, int]]
    ending: Any
    first: Violation | None = None
    last: Violation | None = None
    effects: list[Any] | None = None

    def run(self, watch: Callable[[int, Any, int, list[Any]], None] = lambda *_: None) -> None:
        """Step to the end, or to the step that raises. `watch` is told number, event, now_ms and effects."""
        for number, (event, now_ms) in enumerate(self.steps, start=1):
            try:
                self.effects = self.stack.step(event, now_ms)
            except Exception as error:
                self._broke(Violation("step", reason_of(error), number))
                watch(number, event, now_ms, [])
                return
            watch(number, event, now_ms, self.effects)
            try:
                self.stack.core.check()
            except Exception as error:
                self._broke(Violation("check", reason_of(error), number))
            else:
                self.last = None

    def _broke(self, violation: Violation) -> None:
        self.first = self.first or violation
        self.last = violation

    @property
    def status(self) -> Any:
        """The state after the last step, as STATUS shows it."""
        return ending_of(self.stack, self.steps[-1][1] if self.steps else 0)

    @property
    def differences(self) -> list[str]:
        """Where this run did not end as recorded; none when the story reproduces."""
        place, reason = self.head["place"], self.head["reason"]
        found = []
        if place == "outside":
            if self.last is not None and self.last.place == "step":
                found.append(f"a step raised that had not: {self.last.reason}")
        elif self.last is None:
            found.append("nothing is broken at the end")
        elif (self.last.place, self.last.reason, self.last.steps) != (place, reason, len(self.steps)):
            found.append(f"{self.last.place} {self.last.steps} broke instead: {self.last.reason}")
        if self.status != self.ending:
            found.append(
                f"the state at the end is not the recorded one: {self.status} instead of {self.ending}"
            )
        return found


def read_story(lines: list[str]) -> Replay:
    """Rebuild what a file holds. Raises `UnreadableStory`."""
    try:
        head, state, answers, *steps, ending = [json.loads(line) for line in lines]
        if head["story"] != FORMAT:
            raise UnreadableStory(f"its form is {head['story']}, this is for {FORMAT}")
        given = iter(answers["answers"])
        reader = Reader(lambda *_: next(given))
        stack = reader.value(state["state"])
        events = [(Reader(lambda *_: None).value(step["event"]), step["ms"]) for step in steps]
        replay = Replay(head, stack, events, ending["ending"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableStory(f"it is damaged: {error!r}") from error
    if len(events) != head["steps"]:
        raise UnreadableStory(f"it has {len(events)} steps of {head['steps']}: its end is missing")
    return replay


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        sys.stderr.write("usage: python -m tests.sim.replay_story FILE\n")
        return 2
    try:
        replay = read_story(Path(argv[0]).read_text(encoding="utf-8").splitlines())
    except (OSError, UnreadableStory) as error:
        sys.stderr.write(f"{argv[0]}: {error}\n")
        return 2
    head = replay.head
    _tell(f"{head['role']} node {head['incarnation']}, Tandem {head['version']}, {head['steps']} steps")
    if head["version"] != VERSION:
        _tell(f"this is Tandem {VERSION}: it may play differently")
    replay.run(_tell_step)
    _tell(f"recorded: {head['place']}: {head['reason']}")
    if replay.first is not None:
        _tell(f"replayed: {replay.first.place} {replay.first.steps}: {replay.first.reason}")
    elif head["place"] == "outside":
        _tell("replayed: every step, and nothing broke: the fault lies outside of the stack")
    for difference in replay.differences:
        _tell(f"NOT REPRODUCED: {difference}")
    if not replay.differences:
        _tell("reproduced")
    return 1 if replay.differences else 0


def _tell_step(number: int, event: Any, now_ms: int, effects: list[Any]) -> None:
    wanted = ", ".join(_short(effect) for effect in effects) or "-"
    _tell(f"{number:5} {now_ms:>10} ms  {_short(event)}  ->  {wanted}")


def _short(value: Any) -> str:
    """An event or effect in a few words; wrappers give way to what they carry."""
    inner = getattr(value, "item", None) or getattr(value, "message", None)
    name = type(value).__name__
    if inner is not None:
        return f"{name}({_short(inner)})"
    named = [
        f"{field}={getattr(value, field)}"
        for field in ("job_id", "label", "slot", "epoch", "lane")
        if hasattr(value, field)
    ]
    return f"{name}({', '.join(named)})" if named else name


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
