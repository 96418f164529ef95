"""Which CPUs a daemon runs on.

Decides what `--cpus` means: the parse for the configuration, the pinning for a daemon's start. Pinning keeps
two daemons on one machine out of each other's caches. It must be called before the threads start that are to
be pinned; those that a library already started are caught as well.
"""

import os
import re
from pathlib import Path

from common.log import NodeLog
from common.log_events import LogEvent

_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


def parse_cpus(text: str) -> tuple[int, ...]:
    """CPU numbers of a list such as `0,2-3`, ascending and without repeats.

    Raises ValueError when the text is no such list or names a CPU that this process may not use.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ValueError(f"{text!r} is not a list of CPUs; use numbers and ranges, as in 0,2-3")
        numbers.update(range(first, last + 1))
    return check_cpus(tuple(sorted(numbers)))


def check_cpus(cpus: tuple[int, ...]) -> tuple[int, ...]:
    """Return `cpus` if this process may use each of them and there is one. Raises ValueError."""
    usable = available_cpus()
    missing = [cpu for cpu in cpus if cpu not in usable]
    if missing or not cpus:
        raise ValueError(
            f"CPU {', '.join(map(str, missing)) or 'list empty'}: not available here; "
            f"this process may use {', '.join(map(str, sorted(usable)))}"
        )
    return cpus


def available_cpus() -> frozenset[int]:
    """CPUs this process may run on: all of the machine where the system has no notion of it."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def thread_count(cpus: tuple[int, ...] | None) -> int:
    """How many compute threads to use: one for each CPU of the list, or of all that are available."""
    return len(available_cpus() if cpus is None else cpus)


def pin_process(cpus: tuple[int, ...] | None, log: NodeLog) -> None:
    """Run every thread of this process on `cpus` only; None leaves it alone. Warns where it cannot."""
    if cpus is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        log.warning(LogEvent.NODE_NOT_PINNED, cpus=cpus, reason="this system cannot pin processes")
        return
    # The call pins one thread. New threads inherit it; those that a library made at import do not.
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cpus)
        except ProcessLookupError:
            continue
