"""The last steps of a node, kept so that a broken invariant can be played again.

Decides what is remembered: the state at some moment, written down by `common.story_form`, and every (event,
now_ms) since. Called by `transport.daemon` before each step; the lines go to a file only when the node
breaks. It must never change what the object does, keep what a client wrote, or grow without bound.

Two generations are kept, each a state and the steps that follow it, so at least `STEPS_PER_SNAPSHOT` steps
are there once so many were made. To write a state down takes the loop some 25 us for each live job: with a
long queue it is done less often, so that a step never costs much more than with a short one. A generation
ends early when its events hold more than `ITEMS_PER_SNAPSHOT` items: what a peer sends must not stay in
memory at will.

What is stepped is a function of its events, of time, and of what it asks functions from outside for (new
ids): these are exchanged for recording ones when the story begins.
"""

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from functools import cache
from types import MethodType
from typing import Any, Final, get_args, get_origin, get_type_hints

from common.errors import InvariantViolation
from common.story_form import (
    ATOMS,
    FUNCTIONS,
    SIZED,
    Blank,
    Form,
    Source,
    attributes_of,
    is_hidden,
    shows_bytes,
)

STEPS_PER_SNAPSHOT: Final = 2_048
ITEMS_PER_SNAPSHOT: Final = 200_000
OBJECTS_USUAL: Final = 500  # in a state; with twice as many, twice the steps pass before the next snapshot
STRETCH_MAX: Final = 8
FORMAT: Final = 1
_SHORT: Final = 256  # a hidden value up to this length is blanked when it is written, not when it is kept


@dataclass(frozen=True, slots=True)
class _Generation:
    """A state, and what happened from there."""

    state: Any
    steps: list[tuple[Any, int]]
    answers: list[Any]


class Story:
    """The story of one pure object with `step(event, now_ms)`."""

    def __init__(self, stepped: Any, steps_per_snapshot: int = STEPS_PER_SNAPSHOT) -> None:
        """Begin. Functions from outside that `stepped` holds are exchanged for recording ones."""
        self._stepped = stepped
        self._steps_per_snapshot = steps_per_snapshot
        self._older: _Generation | None = None
        self._answers: list[Any] = []
        for holder, name, function in list(_functions_in(stepped)):
            setattr(holder, name, Source(function, self._answered))
        self._begin()

    def record(self, event: Any, now_ms: int) -> None:
        """The object is about to be stepped."""
        if len(self._steps) >= self._steps_max or self._item_count > ITEMS_PER_SNAPSHOT:
            self._older = self._newer
            self._begin()
        self._steps.append((self._slim(event), now_ms))

    @property
    def last_ms(self) -> int:
        """The moment of the last step; 0 before the first."""
        steps = self._steps or (self._older.steps if self._older is not None else [])
        return steps[-1][1] if steps else 0

    def lines(self, head: dict[str, Any], ending: Any) -> Iterator[str]:
        """The file, line by line. head: plain values about the process; ending: its state in plain values."""
        kept = [self._newer] if self._older is None else [self._older, self._newer]
        steps = [step for generation in kept for step in generation.steps]
        answers = [answer for generation in kept for answer in generation.answers]
        yield _line({"story": FORMAT, **head, "steps": len(steps)})
        yield _line({"state": kept[0].state})
        yield _line({"answers": answers})
        for event, now_ms in steps:
            yield _line({"ms": now_ms, "event": Form().plain(event)})
        yield _line({"ending": ending})

    def _begin(self) -> None:
        self._steps: list[tuple[Any, int]] = []
        self._answers = []
        self._item_count = 0
        form = Form()
        self._newer = _Generation(form.plain(self._stepped), self._steps, self._answers)
        stretch = min(max(form.object_count / OBJECTS_USUAL, 1.0), STRETCH_MAX)
        self._steps_max = round(stretch * self._steps_per_snapshot)

    def _answered(self, answer: Any) -> None:
        self._answers.append(answer)
        self._item_count += len(answer)

    def _slim(self, value: Any) -> Any:
        """A frozen value without what is long and will be blanked anyway; what else is long is counted."""
        changes: dict[str, Any] | None = None
        for name, hidden, may_be_short in _bulky_fields(type(value)):
            item = getattr(value, name)
            kind = type(item)
            if kind not in SIZED:
                slim = self._slim(item)
            elif not hidden:
                self._item_count += len(item)
                continue
            elif may_be_short and len(item) <= _SHORT:
                continue
            else:
                slim = Blank(kind.__name__, len(item))
            if slim is not item:
                changes = {**(changes or {}), name: slim}
        return value if changes is None else replace(value, **changes)


def reason_of(error: Exception) -> str:
    """How an exception is recorded."""
    return str(error) if isinstance(error, InvariantViolation) else repr(error)


def ending_of(stack: Any, last_ms: int) -> Any:
    """A node's state as STATUS shows it, in JSON values; a text when it is too broken for that."""
    try:
        return json.loads(json.dumps(stack.core.status(last_ms), default=str))
    except Exception as error:
        return f"no status: {error!r}"


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), default=str) + "\n"


def _functions_in(root: Any) -> Iterator[tuple[Any, str, Any]]:
    """(holder, name of the attribute, function) of every plain function that an object in there holds."""
    seen: set[int] = set()
    pending = deque([root])
    while pending:
        value = pending.popleft()
        if type(value) in ATOMS or isinstance(value, (type, *FUNCTIONS)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, MethodType):
            pending.append(value.__self__)
        elif isinstance(value, dict):
            pending.extend((*value.keys(), *value.values()))
        elif isinstance(value, (tuple, list, set, deque)):
            pending.extend(value)
        else:
            for name, item in attributes_of(value):
                if isinstance(item, FUNCTIONS):
                    yield value, name, item
                pending.append(item)


@cache
def _bulky_fields(kind: type) -> tuple[tuple[str, bool, bool], ...]:
    """Fields of a frozen class that may hold much: name, whether it is hidden, whether it may be short.

    What holds other things than numbers and characters may hold much even when it is not long.
    """
    if not is_dataclass(kind):
        return ()
    bulky = []
    for name, hint in get_type_hints(kind).items():
        alternatives = get_args(hint) if type(None) in get_args(hint) else (hint,)
        hidden = is_hidden(kind, name) or (bytes in alternatives and not shows_bytes(name))
        if all(_is_light(part, hidden) for part in alternatives):
            continue
        bulky.append((name, hidden, all(_is_flat(part) for part in alternatives)))
    return tuple(bulky)


def _is_light(hint: Any, hidden: bool) -> bool:
    scalar = hint in (int, float, bool, type(None)) or (isinstance(hint, type) and issubclass(hint, Enum))
    return scalar or (hint in (str, bytes) and not hidden)


def _is_flat(hint: Any) -> bool:
    numbers = get_origin(hint) is tuple and get_args(hint)[0] is int
    return numbers or hint in (str, bytes, int, type(None))
