"""Loading of what a daemon's thread works with, and what the loop is told of it.

Decides what becomes of a failure: its words where they are for a person, else the traceback, since foreign
code may raise anything. Used by the compute and text threads. It must never let one of them die in silence.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from common.engines.interface import Capabilities
from common.errors import ConfigError

Loaded = TypeVar("Loaded")


@dataclass(frozen=True, slots=True)
class EngineLoaded:
    """The engine is ready."""

    capabilities: Capabilities


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The engine or the tokenizer could not be loaded."""

    detail: str


def load_or_fail(load: Callable[[], Loaded]) -> Loaded | LoadFailed:
    """What `load` makes, or why it does not."""
    try:
        return load()
    except ConfigError as error:
        return LoadFailed(str(error))
    except Exception:
        return LoadFailed(traceback.format_exc())
