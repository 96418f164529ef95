"""What all simulated processes have in common: a name, a clock with pauses, life and death."""

from typing import TYPE_CHECKING, Any

from common import limits
from tests.sim.plan import Option
from transport.port import ControlPort

if TYPE_CHECKING:
    from tests.sim.world import World


class Names:
    """A source of fresh names that can be copied."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.number = 0

    def __call__(self) -> str:
        self.number += 1
        return f"{self.prefix}-{self.number}"


class Process:
    """One process. Its clock leaves out pauses by the rule of `transport.loop.Loop`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.incarnations = 0
        self.alive = True
        self.stopped_at_ms: int | None = None
        self.offset_ms = 0
        self.hung = False
        self.slow_until_ms = 0

    @property
    def runs(self) -> bool:
        """Alive and not stopped."""
        return self.alive and self.stopped_at_ms is None

    def local_ms(self, now_ms: int) -> int:
        """The process's own clock; meaningful while it runs."""
        return now_ms - self.offset_ms

    def own_deadline_ms(self) -> int | None:
        """When the process must look at its clock, by that clock."""
        raise AssertionError("each kind of process says so itself")

    def due_ms(self, now_ms: int) -> int | None:
        """The same by the world's clock, never in the past; or when slow compute is through."""
        deadline_ms = self.own_deadline_ms()
        due_ms = None if deadline_ms is None else max(now_ms, deadline_ms + self.offset_ms)
        if self.slow_until_ms > now_ms and (due_ms is None or self.slow_until_ms < due_ms):
            return self.slow_until_ms
        return due_ms

    def prompt_options(self, now_ms: int) -> list[Option]:
        """What the running process can do at once, by itself."""
        return []

    def stop(self, now_ms: int) -> None:
        self.stopped_at_ms = now_ms

    def go_on(self, now_ms: int) -> None:
        """The poll that was cut short returns; only what it is late by counts as a pause."""
        deadline_ms = self.own_deadline_ms()
        stopped_ms, self.stopped_at_ms = self.stopped_at_ms, None
        if deadline_ms is None:
            return
        late_ms = now_ms - max(stopped_ms, deadline_ms + self.offset_ms)
        if late_ms >= limits.PAUSE_MS:
            self.offset_ms += late_ms

    def tick(self, world: "World") -> None:
        raise AssertionError("each kind of process says so itself")


def outbox_deadline_ms(port: Any) -> int | None:
    """When a port gives a peer up that takes nothing. Retries before that follow from deliveries."""
    if not isinstance(port, ControlPort) or not port._outboxes:
        return None
    return min(outbox.blocked_ms for outbox in port._outboxes.values()) + port._give_up_ms
