"""All prefill nodes of one decode node.

Decides which of them gets the next prompt and which one a session or a reservation belongs to. Called by the
decode core and its parts. Sessions are named by the prefill nodes at random, so a session alone tells the
node; it must never be looked for by job.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from common.errors import check
from decode_node.events import WorkerSuspected
from decode_node.slots import GrantedSlot, Reservation
from decode_node.worker import Completion, Worker
from transport.bulk import ChunksLanded, PiecesMoved


class Workers:
    """Prefill nodes by name; the name is the endpoint."""

    def __init__(self, names: Iterable[str], dead_after_ms: int) -> None:
        self._workers = {name: Worker(name, dead_after_ms) for name in names}

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def get(self, name: str) -> Worker:
        return self._workers[name]

    @property
    def usable(self) -> bool:
        """Whether a prompt could be sent to one of them, if it had a slot free."""
        return any(worker.usable for worker in self)

    @property
    def unusable_since_ms(self) -> int:
        """Since when none has been usable, if none is."""
        return max((worker.unusable_since_ms for worker in self), default=0)

    @property
    def max_tokens(self) -> int | None:
        """What a slot of every open session holds."""
        known = [worker.max_tokens for worker in self if worker.max_tokens is not None]
        return min(known, default=None)

    @property
    def logits(self) -> bool:
        """Whether every usable one answers the logits of a prompt's last position."""
        return all(worker.profile.answers_logits for worker in self if worker.usable)

    @property
    def granted_count(self) -> int:
        """Slots that productions may be sent into, now or when they are free."""
        return sum(worker.ledger.granted_count for worker in self if worker.usable)

    @property
    def live_count(self) -> int:
        """PRODUCING, READY and IMPORTING slots, survivors included."""
        return sum(worker.ledger.live_count for worker in self)

    @property
    def idle(self) -> bool:
        return all(worker.ledger.idle for worker in self)

    def reservable(self) -> GrantedSlot | None:
        """A slot for the next production, of the node with the least work; None when there is none."""
        candidates = [
            (worker.work_count, slot)
            for worker in self
            if worker.usable and (slot := worker.ledger.reservable()) is not None
        ]
        return min(candidates, key=lambda candidate: candidate[0], default=(0, None))[1]

    def of(self, session: str) -> Worker | None:
        """The node that has, or had, this session; None when nothing of it is left."""
        return next((worker for worker in self if worker.knows(session)), None)

    def on_suspected(self, event: WorkerSuspected, now_ms: int) -> list[Any]:
        worker = self.of(event.session)
        return [] if worker is None else worker.on_suspected(event, now_ms)

    def receive(self, session: str, message: Any, now_ms: int) -> tuple[Completion | None, list[Any]]:
        """See `Worker.receive`."""
        worker = self.of(session)
        return (None, []) if worker is None else worker.receive(session, message, now_ms)

    def on_kv_moved(self, event: PiecesMoved, now_ms: int) -> list[Any]:
        worker = self.of(event.session)
        if worker is not None:
            worker.kv_moved(Reservation(event.session, event.slot, event.epoch), now_ms)
        return []

    def kv_landed(self, event: ChunksLanded, now_ms: int) -> tuple[str | None, list[Any]]:
        """See `Worker.chunks_landed`."""
        worker = self.of(event.session)
        if worker is None:
            return None, []
        return worker.chunks_landed(Reservation(event.session, event.slot, event.epoch), now_ms)

    def detach(self, reservation: Reservation, cause: str, now_ms: int) -> list[Any]:
        """See `Worker.detach`; a slot that is gone needs no word."""
        worker = self.of(reservation.session)
        return [] if worker is None else worker.detach(reservation, cause, now_ms)

    def holder(self, reservation: Reservation) -> Worker:
        """The node whose slot is reserved. Raises `InvariantViolation` when nothing of it is left."""
        worker = self.of(reservation.session)
        check(worker is not None, "a job uses a slot of a session that is gone")
        return worker

    def expire(self, now_ms: int) -> list[Any]:
        return [effect for worker in self for effect in worker.expire(now_ms)]

    def deadline_ms(self) -> int | None:
        deadlines = [worker.deadline_ms() for worker in self]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)
