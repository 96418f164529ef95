"""From what msgpack yields to typed messages, strictly.

Decides what a well-typed field is; the codec makes one reader for each message class when it is imported.
Nothing is coerced. The first fault ends the work, so that a message with a million faults costs no more than
one with a single fault. No error text repeats a value or a key: it may be somebody's prompt. Only the types
that `common.messages` uses are known; any other fails at import, never on the wire.
"""

from collections.abc import Callable
from dataclasses import is_dataclass
from enum import StrEnum
from math import isfinite
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Le, MaxLen

Reader = Callable[[Any], Any]

_PLAIN = {int: "an integer", str: "a string", bytes: "binary data", bool: "true or false"}


class WrongValue(Exception):
    """What was expected, and where, as `field.field: text`. Never leaves the codec."""


def reader_of(hint: Any) -> Reader:
    """A function that turns an unpacked value into a `hint`, or raises `WrongValue`.

    Raises TypeError for a hint that no message may have.
    """
    arguments = get_args(hint)
    if hint is Any:
        return _unchanged
    if hint in _PLAIN:
        return _plain(hint)
    if hint is float:
        return _finite
    if is_dataclass(hint):
        return _record(hint)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _member(hint)
    if get_origin(hint) is Annotated:
        return _bounded(*arguments)
    if get_origin(hint) in (Union, UnionType) and len(arguments) == 2 and arguments[1] is type(None):
        return _optional(reader_of(arguments[0]))
    if get_origin(hint) is tuple and arguments[1:] == (...,):
        return _array(arguments[0])
    if get_origin(hint) is dict and arguments[0] is str:
        return _map(reader_of(arguments[1]))
    raise TypeError(f"{hint} cannot travel")


def _unchanged(value: Any) -> Any:
    return value


def _finite(value: Any) -> float:
    if type(value) is not float or not isfinite(value):
        raise WrongValue(": expected a finite number with a decimal point")
    return value


def _plain(kind: type) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise WrongValue(f": expected {_PLAIN[kind]}")
        return value

    return read


def _bounded(kind: type, *bounds: Ge | Le | MaxLen) -> Reader:
    limits = {type(bound): bound for bound in bounds}
    if kind is int and limits.keys() == {Ge, Le}:
        low, high = limits[Ge].ge, limits[Le].le
        wrong = f": expected an integer from {low} to {high}"
    elif kind is str and limits.keys() == {MaxLen}:
        low, high = 0, limits[MaxLen].max_length
        wrong = f": expected a string of at most {high} characters"
    else:
        raise TypeError(f"bounds {bounds} of {kind.__name__} are not known")
    size = len if kind is str else _unchanged

    def read(value: Any) -> Any:
        if type(value) is not kind or not low <= size(value) <= high:
            raise WrongValue(wrong)
        return value

    return read


def _member(kind: type[StrEnum]) -> Reader:
    members = {str(member): member for member in kind}

    def read(value: Any) -> StrEnum:
        if type(value) is not str or value not in members:
            raise WrongValue(f": expected a {kind.__name__}")
        return members[value]

    return read


def _optional(read_present: Reader) -> Reader:
    def read(value: Any) -> Any:
        return None if value is None else read_present(value)

    return read


def _array(item_hint: Any) -> Reader:
    # Prompts and answers are long arrays of plain integers: one pass in C, and nothing to copy.
    plain = item_hint in _PLAIN
    read_item = reader_of(item_hint)

    def read(value: Any) -> tuple:
        if type(value) is not tuple:
            raise WrongValue(": expected an array")
        if plain and list(map(type, value)).count(item_hint) == len(value):
            return value
        return tuple([read_item(item) for item in value])

    return read


def _map(read_item: Reader) -> Reader:
    def read(value: Any) -> dict[str, Any]:
        if type(value) is not dict or not {str}.issuperset(map(type, value)):
            raise WrongValue(": expected a map with strings for keys")
        return {key: read_item(item) for key, item in value.items()}

    return read


def _record(cls: type) -> Reader:
    readers = {name: reader_of(hint) for name, hint in get_type_hints(cls, include_extras=True).items()}

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise WrongValue(": expected a map")
        arguments = {}
        for name, item in value.items():
            read_item = readers.get(name)
            if read_item is None:
                # Not its name, which may be data of the client: this text is logged.
                raise WrongValue(f": unknown field; known are {', '.join(sorted(readers))}")
            try:
                arguments[name] = read_item(item)
            except WrongValue as error:
                raise WrongValue(f".{name}{error}") from None
        if len(arguments) < len(readers):
            raise WrongValue(f": field {min(readers.keys() - arguments.keys())} is missing")
        return cls(**arguments)

    return read
