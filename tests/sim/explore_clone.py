"""Fast copies of a simulated world, for exploration.

Decides what two worlds may share: values that nobody can change. `clone_of` copies every mutable object that
can be reached, once, and binds handlers to the copies. Nothing is listed by hand, so new state is copied
without a word here; a value of a kind that is not understood raises instead of being shared. A clone must
never see what is later done to its original.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeVar

Thing = TypeVar("Thing")
Memo = dict[int, Any]

_HANDLER_TABLES = {"_handlers"}
_ATOMS = (int, float, str, bytes, type(None), Enum, type, BuiltinFunctionType)


def clone_of(thing: Thing) -> Thing:
    """An independent copy. Raises TypeError for what cannot be copied, such as a closure."""
    copier = _COPIERS[type(thing)]
    return thing if copier is None else copier(thing, {})


def unbind(world: Any) -> None:
    """Cut the only cycles of a world that is no longer needed: handlers bound to their owner."""
    for process in world.processes.values():
        if hasattr(process, "connector"):
            _unbind_parts(process.connector)
        else:
            stack = process.stack
            rows = [getattr(stack, name, {}).values() for name in ("connectors", "receivers", "senders")]
            _unbind_parts(stack, stack.listener, stack.core, *(part for row in rows for part in row))


def _unbind_parts(*parts: Any) -> None:
    for part in parts:
        for name in part.__dict__.keys() & _HANDLER_TABLES:
            table = getattr(part, name)
            table.clear()
            if type(table) is Handlers:
                table.owner = None


class Handlers(dict[type, MethodType]):
    """The handlers of a copy, bound when they are first asked for; most never are."""

    def __init__(self, owner: Any, unbound: dict[type, tuple[Any, str | None]]) -> None:
        super().__init__()
        self.owner = owner
        self.unbound = unbound

    def __missing__(self, event: type) -> MethodType:
        function, part = self.unbound[event]
        self[event] = bound = MethodType(function, self.owner if part is None else getattr(self.owner, part))
        return bound

    def get(self, event: type, otherwise: Any = None) -> Any:
        return self[event] if event in self.unbound else otherwise


def _copy_handlers(owner: Any, copied: Any, table: dict[type, MethodType]) -> Handlers:
    if type(table) is Handlers:
        return Handlers(copied, table.unbound)
    parts = {id(part): name for name, part in owner.__dict__.items()} | {id(owner): None}
    return Handlers(
        copied, {event: (method.__func__, parts[id(method.__self__)]) for event, method in table.items()}
    )


@cache
def slots_of(cls: type) -> tuple[str, ...]:
    """The slots of a class and its bases; empty when its objects have a `__dict__`."""
    if any("__dict__" in base.__dict__ for base in cls.__mro__):
        return ()
    return tuple(name for base in cls.__mro__ for name in base.__dict__.get("__slots__", ()))


class _Copiers(dict[type, Callable[[Any, Memo], Any] | None]):
    """How to copy a value, by its type; None: it is shared."""

    def __missing__(self, cls: type) -> Callable[[Any, Memo], Any] | None:
        self[cls] = copier = _copier_for(cls)
        return copier


def _copier_for(cls: type) -> Callable[[Any, Memo], Any] | None:
    if issubclass(cls, _ATOMS) or (is_dataclass(cls) and cls.__dataclass_params__.frozen):
        return None
    if issubclass(cls, tuple):
        return None if hasattr(cls, "_fields") else _copy_tuple
    if cls is FunctionType:
        return _share_function
    known = {
        list: _copy_list,
        dict: _copy_dict,
        deque: _copy_deque,
        set: lambda value, memo: value.copy(),
        frozenset: None,
        Counter: lambda value, memo: value.copy(),
        OrderedDict: _copy_ordered,
        MethodType: _copy_method,
    }
    if cls in known:
        return known[cls]
    if cls is Handlers:
        return _copy_dict
    if cls.__module__ == "builtins" or issubclass(cls, (list, dict, set, deque)):
        raise TypeError(f"exploration does not know how to copy a {cls.__name__}")
    slots = slots_of(cls)
    return _slotted_copier(slots) if slots else _copy_object


_COPIERS = _Copiers()


def _copy_list(value: list[Any], memo: Memo) -> list[Any]:
    return [item if (copier := _COPIERS[type(item)]) is None else copier(item, memo) for item in value]


def _copy_deque(value: deque[Any], memo: Memo) -> deque[Any]:
    return deque(_copy_list(value, memo)) if value else deque()


def _copy_tuple(value: tuple[Any, ...], memo: Memo) -> tuple[Any, ...]:
    return tuple(_copy_list(value, memo))


def _copy_dict(value: dict[Any, Any], memo: Memo) -> dict[Any, Any]:
    return {
        key: item if (copier := _COPIERS[type(item)]) is None else copier(item, memo)
        for key, item in value.items()
    }


def _copy_ordered(value: OrderedDict[Any, Any], memo: Memo) -> OrderedDict[Any, Any]:
    return OrderedDict(_copy_dict(value, memo))


def _copy_method(value: MethodType, memo: Memo) -> MethodType:
    owner = value.__self__
    return MethodType(value.__func__, _COPIERS[type(owner)](owner, memo))


def _share_function(value: FunctionType, memo: Memo) -> FunctionType:
    if value.__closure__:
        raise TypeError(f"exploration cannot copy what {value.__qualname__} holds: make it an object")
    return value


def _copy_object(value: Any, memo: Memo) -> Any:
    copied = memo.get(id(value))
    if copied is not None:
        return copied
    memo[id(value)] = copied = object.__new__(type(value))
    attributes = copied.__dict__
    attributes.update(value.__dict__)
    for name, item in value.__dict__.items():
        copier = _COPIERS[type(item)]
        if copier is None:
            continue
        if name in _HANDLER_TABLES:
            attributes[name] = _copy_handlers(value, copied, item)
        else:
            attributes[name] = copier(item, memo)
    return copied


def _slotted_copier(slots: tuple[str, ...]) -> Callable[[Any, Memo], Any]:
    def copy_slotted(value: Any, memo: Memo) -> Any:
        copied = memo.get(id(value))
        if copied is not None:
            return copied
        memo[id(value)] = copied = object.__new__(type(value))
        for name in slots:
            item = getattr(value, name)
            copier = _COPIERS[type(item)]
            setattr(copied, name, item if copier is None else copier(item, memo))
        return copied

    return copy_slotted
