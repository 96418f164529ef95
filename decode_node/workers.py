"""All prefill nodes of one decode node.

Decides which of them gets the next prompt and which one a session or a reservation belongs to. Called by the
decode core and its parts. Sessions are named by the prefill nodes at random, so a session alone tells the
node; it must never be looked for by job.
"""

from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any

from common.errors import check
from common.lifecycle import SlotState
from decode_node.affinity import PrefixAffinity
from decode_node.events import WorkerSuspected
from decode_node.jobs import Job
from decode_node.slots import GrantedSlot, Reservation
from decode_node.worker import Completion, Worker
from transport.bulk import ChunksLanded, PiecesMoved


class Workers:
    """Prefill nodes by name; the name is the endpoint."""

    def __init__(self, names: Iterable[str], dead_after_ms: int) -> None:
        self._workers = {name: Worker(name, dead_after_ms) for name in names}
        self._affinity = PrefixAffinity()

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
        """What the largest slot of an open session holds."""
        known = [worker.max_tokens for worker in self if worker.max_tokens is not None]
        return max(known, default=None)

    @property
    def logits(self) -> bool:
        """Whether every usable one answers the logits of a prompt's last position."""
        return all(worker.profile.answers_logits for worker in self if worker.usable)

    @property
    def granted_count(self) -> int:
        """Slots that productions may be sent into, now or when they are free."""
        return sum(worker.ledger.granted_count for worker in self if worker.usable)

    @property
    def slot_count(self) -> int:
        """All slots granted, and survivors: the most productions that can be held."""
        return sum(worker.ledger.granted_count + worker.ledger.survivor_count for worker in self)

    @property
    def live_count(self) -> int:
        """PRODUCING, READY and IMPORTING slots, survivors included."""
        return sum(worker.ledger.live_count for worker in self)

    @property
    def idle(self) -> bool:
        return all(worker.ledger.idle for worker in self)

    def choose(self, job: Job) -> GrantedSlot | None:
        """A slot for the job's production, None when none is free.

        Of the nodes whose slots hold the job: rather not the one where it has just failed; of the others one
        with the least work, or with one production more if it keeps prefixes and was sent the beginning of
        the prompt before.
        """
        usable = [worker for worker in self if worker.usable]
        fitting = [worker for worker in usable if job.total_tokens <= worker.max_tokens] or usable
        slots = {worker.name: worker.ledger.reservable() for worker in fitting}
        candidates = [worker for worker in fitting if slots[worker.name] is not None]
        if len(candidates) <= 1:
            return slots[candidates[0].name] if candidates else None
        known = self._affinity.known_tokens(job.cache_digest, job.prompt)
        least = min(worker.work_count for worker in candidates)

        def preference(worker: Worker) -> tuple[bool, bool, int, int]:
            more = worker.work_count - least
            kept_tokens = known.get(worker.name, 0) if worker.profile.keeps_prefixes else 0
            return worker.name == job.sent_to, more > 1, -kept_tokens, more

        return slots[min(candidates, key=preference).name]

    def note_sent(self, job: Job, worker: Worker) -> None:
        """The job's prompt goes to that node: what begins like it had better follow."""
        if len(self._workers) > 1 and worker.profile.keeps_prefixes:
            self._affinity.note(job.cache_digest, job.prompt, worker.name)

    def give_back(self) -> list[Any]:
        """See `Worker.give_back`."""
        return [effect for worker in self for effect in worker.give_back()]

    def hurry(self, lanes_free: int, order_of: Callable[[str], int]) -> list[Any]:
        """Tell the producers of what free lanes wait for, if they do not know.

        order_of: a job's place in the queue, by its id.
        """
        calm = [
            (order_of(slot.job_id), worker, slot)
            for worker in self
            for slot in worker.ledger.slots()
            if slot.state is SlotState.PRODUCING and not slot.urgent
        ]
        if not calm:
            return []
        # All others that are held have a lane, or will take one of the free ones first.
        importing = sum(worker.ledger.importing_count for worker in self)
        wanted = max(0, lanes_free - (self.live_count - len(calm) - importing))
        first = sorted(calm, key=itemgetter(0))[:wanted]
        return [effect for _, worker, slot in first for effect in worker.hurry(slot)]

    def of(self, session: str) -> Worker | None:
        """The node that has, or had, this session; None when nothing of it is left."""
        return next((worker for worker in self if worker.knows(session)), None)

    def lost(self, name: str, session: str, now_ms: int) -> tuple[list[str], list[Any]]:
        """See `Worker.lost`; what the node's cache held is in doubt."""
        self._affinity.forget(name)
        return self._workers[name].lost(session, now_ms)

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
