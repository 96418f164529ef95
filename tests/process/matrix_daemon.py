"""A daemon under conditions that no flag gives.

`python -m tests.process.matrix_daemon CONDITIONS PROGRAM FLAGS` runs what `python -m PROGRAM FLAGS` would.

It decides what is made worse before the daemon's own `__main__` runs, in the daemon's process: queues of one
message, and a short random pause at every hand-over between socket, loop, core and threads. Started by
`tests/process/harness.py`. The product holds no trace of it; it must change times and capacities alone, never
what is said or decided.

CONDITIONS is a JSON object; what is left out stays as it is:

    high_water_mark   messages that a socket takes before it says that it is full
    outbox            messages that wait for a socket that is full, before its peer's session ends
    delay_ms          longest pause at a hand-over; one in two is left out, the rest are uniform
    seed              of the pauses
    wait_for          path: import everything, make PATH.waiting, then begin when PATH is there
"""

import functools
import json
import random
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import limits
from common.clock import pause_ms
from decode_node.node import DecodeNode
from prefill_node.node import PrefillNode
from transport.loop import Commands, Mailbox
from transport.port import ControlPort

POLL_MS = 1


class Pauses:
    """Random pauses from one seed; the threads of the daemon draw from them in the order they come by."""

    def __init__(self, longest_ms: float, seed: int) -> None:
        self._longest_ms = longest_ms
        self._chance = random.Random(seed)

    def take(self) -> None:
        drawn = 2 * self._chance.random() - 1
        if drawn > 0:
            pause_ms(drawn * self._longest_ms)

    def before(self, owner: type, name: str) -> None:
        """Have every call of this method wait a little first."""
        method: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(method)
        def late(*arguments: Any, **options: Any) -> Any:
            self.take()
            return method(*arguments, **options)

        setattr(owner, name, late)

    def between(self, owner: type, name: str) -> None:
        """Have this generator wait a little before every item."""
        method: Callable[..., Iterator[Any]] = getattr(owner, name)

        @functools.wraps(method)
        def late(*arguments: Any) -> Iterator[Any]:
            for item in method(*arguments):
                self.take()
                yield item

        setattr(owner, name, late)


def worsen(conditions: dict[str, Any]) -> None:
    """Change this process as the conditions say."""
    limits.HIGH_WATER_MARK_MESSAGES = conditions.get("high_water_mark", limits.HIGH_WATER_MARK_MESSAGES)
    limits.UNREAD_MESSAGES = conditions.get("high_water_mark", limits.UNREAD_MESSAGES)
    limits.OUTBOX_MESSAGES = conditions.get("outbox", limits.OUTBOX_MESSAGES)
    if "delay_ms" in conditions:
        pauses = Pauses(conditions["delay_ms"], conditions.get("seed", 0))
        for node in (DecodeNode, PrefillNode):
            pauses.before(node, "step")
            pauses.before(node, "execute")
        pauses.before(ControlPort, "send")
        pauses.between(ControlPort, "receive")
        pauses.before(Mailbox, "put")
        pauses.before(Commands, "put")
        pauses.before(Commands, "get")
    if "wait_for" in conditions:
        path = Path(conditions["wait_for"])
        path.with_suffix(".waiting").touch()
        while not path.exists():
            pause_ms(POLL_MS)


def main() -> None:
    """Worsen this process, then be the daemon."""
    conditions, program = json.loads(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    worsen(conditions)
    runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
