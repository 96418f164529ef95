"""How the state of a pure object, and what it was told, is written down as JSON values.

Decides what of a value is written and what is blanked. Called by `common.story` alone; its reader is
`tests/sim/replay_story.py`, which knows the classes. It must never change what it walks over, and never fail
on a value that it does not know: such a value is written as `unknown`, and the reader refuses it.

A value that is no JSON by itself becomes a map whose first key says what it is: `tuple`, `list`, `deque`,
`set`, `dict`, `ordered`, `bytes`, `enum`, `class`, `new` (a frozen dataclass), `object` (any other object of
ours), `method` (a bound one), `source` (a function from outside), `blank`. What can be changed is written
once, with a number `id`; later it is `ref`, so shared parts stay shared and cycles end.

Blanked are prompts, texts, token ids, logits and all other bytes that are not a route or a digest: kind and
length alone are written. A replay reproduces nevertheless, because the cores never look at these values: they
count a prompt's bytes, ask whether a token or a stop string is there, and compare digests, which stay.
"""

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

ATOMS = frozenset({int, float, str, bool, type(None)})
SIZED = frozenset({bytes, str, tuple, list, dict})
FUNCTIONS = (FunctionType, BuiltinFunctionType)
_HIDDEN = frozenset(
    {
        "body",
        "cache_salt",
        "first_token",
        "generated",
        "logit_bias",
        "logits",
        "logprobs",
        "messages",
        "prompt",
        "prompt_ids",
        "sampling",
        "stop",
        "stop_token_ids",
        "SubmissionRefused.detail",
        "text",
        "token_id",
        "token_ids",
        "TokenizeRefused.detail",
    }
)


# Of a prefix cache: what stands before the first block of a chain, a digest too.
_ROOTS = frozenset({"parent", "root"})


@dataclass(frozen=True, slots=True)
class Blank:
    """What is kept of a hidden value: the name of its type, and its length."""

    kind: str
    length: int


class Source:
    """A function from outside that the object calls: `answered` is told each of its answers."""

    __slots__ = ("_answered", "_function")

    def __init__(self, function: Callable[..., Any], answered: Callable[[Any], None]) -> None:
        self._function = function
        self._answered = answered

    def __call__(self, *arguments: Any) -> Any:
        answer = self._function(*arguments)
        self._answered(answer)
        return answer


@cache
def is_hidden(kind: type, name: str) -> bool:
    """Whether an attribute of this class and name may hold what a client wrote or got."""
    return name.lstrip("_") in _HIDDEN or f"{kind.__name__}.{name}" in _HIDDEN


@cache
def shows_bytes(name: str) -> bool:
    """Whether bytes in a field of this name may be written."""
    return "route" in name or "digest" in name or name in _ROOTS


@cache
def name_of(kind: type) -> str:
    """A class's name in a file."""
    return f"{kind.__module__}.{kind.__qualname__}"


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of an object's attributes, slots included."""
    for name in _slots(type(value)):
        if hasattr(value, name):
            yield name, getattr(value, name)
    yield from getattr(value, "__dict__", {}).items()


@cache
def _slots(kind: type) -> tuple[str, ...]:
    slots = [getattr(base, "__slots__", ()) for base in reversed(kind.__mro__)]
    return tuple(name for names in slots for name in ((names,) if isinstance(names, str) else names))


@cache
def _is_frozen(kind: type) -> bool:
    return is_dataclass(kind) and kind.__dataclass_params__.frozen


@cache
def _fields(kind: type) -> tuple[tuple[str, bool], ...]:
    """Names of a dataclass's fields, and whether each is hidden."""
    return tuple((field.name, is_hidden(kind, field.name)) for field in fields(kind))


class Form:
    """Writes one graph of objects. `plain` may be called several times; references go on between calls."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._written: list[Any] = []  # an id() says something only while its object lives

    @property
    def object_count(self) -> int:
        """How many objects and containers that can be changed were written."""
        return len(self._written)

    def plain(self, value: Any, name: str = "") -> Any:
        """A value as JSON values; `name` is that of the field it was found in."""
        kind = type(value)
        if kind in ATOMS:
            return value
        writer = _WRITERS.get(kind)
        if writer is None:
            writer = _WRITERS[kind] = _writer_for(kind)
        return writer(self, value, name)

    # Most values are plain already: to ask here, and not in `plain`, halves the time of a snapshot.

    def items(self, values: Any, name: str) -> list[Any]:
        return [value if type(value) in ATOMS else self.plain(value, name) for value in values]

    def pairs(self, value: dict[Any, Any], name: str) -> list[Any]:
        return [self.items(pair, name) for pair in value.items()]

    def attributes(self, value: Any) -> dict[str, Any]:
        """An object's attributes by name."""
        kind = type(value)
        if not is_dataclass(kind):
            return {
                name: self._blanked(item, name) if is_hidden(kind, name) else self.plain(item, name)
                for name, item in attributes_of(value)
            }
        return {
            name: self._blanked(getattr(value, name), name)
            if hidden
            else (item if type(item := getattr(value, name)) in ATOMS else self.plain(item, name))
            for name, hidden in _fields(kind)
        }

    def _blanked(self, value: Any, name: str) -> Any:
        kind = type(value)
        if kind in SIZED:
            return {"blank": kind.__name__, "length": len(value)}
        if kind in ATOMS:
            return value if value is None else kind()
        return self.plain(value, name)

    def once(self, value: Any, tag: str, write: Callable[[], Any]) -> dict[str, Any]:
        """Something that can be changed: written in full the first time."""
        number = self._numbers.get(id(value))
        if number is not None:
            return {"ref": number}
        number = self._numbers[id(value)] = len(self._written)
        self._written.append(value)
        return {tag: write(), "id": number}


_Writer = Callable[[Form, Any, str], Any]


def _write_bytes(form: Form, value: bytes, name: str) -> Any:
    return {"bytes": value.hex()} if shows_bytes(name) else {"blank": "bytes", "length": len(value)}


def _write_frozen(form: Form, value: Any, name: str) -> Any:
    return {"new": name_of(type(value)), "with": form.attributes(value)}


def _write_object(form: Form, value: Any, name: str) -> Any:
    written = form.once(value, "with", lambda: form.attributes(value))
    return written if "ref" in written else {"object": name_of(type(value)), **written}


_WRITERS: dict[type, _Writer] = {
    bytes: _write_bytes,
    Blank: lambda form, value, name: {"blank": value.kind, "length": value.length},
    Source: lambda form, value, name: {"source": True},
    MethodType: lambda form, value, name: {"method": value.__name__, "of": form.plain(value.__self__)},
    type: lambda form, value, name: {"class": name_of(value)},
    tuple: lambda form, value, name: {"tuple": form.items(value, name)},
    list: lambda form, value, name: form.once(value, "list", lambda: form.items(value, name)),
    deque: lambda form, value, name: form.once(value, "deque", lambda: form.items(value, name)),
    set: lambda form, value, name: form.once(value, "set", lambda: form.items(sorted(value, key=repr), name)),
    dict: lambda form, value, name: form.once(value, "dict", lambda: form.pairs(value, name)),
    OrderedDict: lambda form, value, name: form.once(value, "ordered", lambda: form.pairs(value, name)),
}


def _writer_for(kind: type) -> _Writer:
    """The writer of a class that is met for the first time."""
    if issubclass(kind, Enum):
        return lambda form, value, name: {"enum": name_of(kind), "name": value.name}
    if issubclass(kind, type):
        return _WRITERS[type]
    if _is_frozen(kind):
        return _write_frozen
    foreign = kind.__module__.split(".")[0] in sys.stdlib_module_names or kind in FUNCTIONS
    if foreign or not (_slots(kind) or hasattr(kind, "__dict__")):
        return lambda form, value, name: {"unknown": name_of(kind)}
    return _write_object
