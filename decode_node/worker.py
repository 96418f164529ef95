"""The prefill node, as the decode core sees it: the session, its ledger, the completions it owes.

Decides whether the prefill node is usable, which reservation a completion belongs to, when an orphan or a
stalled peer ends the session, and what is sent when a slot changes hands. Called by the core alone. It must
never know jobs beyond their ids, and never look a completion up by job: one job may have an orphan and a live
production at the same time.
"""

from dataclasses import dataclass
from typing import Any

from common import limits
from common.data_planes import SHM, TCP
from common.errors import ErrorCode, check
from common.lifecycle import SlotEvent, SlotState
from common.messages import (
    Cancel,
    Draining,
    Grant,
    GrantLimit,
    HelloOk,
    HelloRefused,
    Hurry,
    NodeProfile,
    Pong,
    Prefill,
    PrefillDone,
    PrefillFailed,
    Release,
    ReturnSlots,
)
from decode_node.events import ClosePlane, CloseWorker, SendToWorker, WorkerSuspected
from decode_node.slots import GrantedSlot, Reservation, SlotLedger

# What a slot's producer still owes something for: its completion, or chunks on their way.
_OWING = (SlotState.PRODUCING, SlotState.ORPHANED)


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion that resolves the future of a live job's reservation. kv_here: its slot is READY."""

    reservation: Reservation
    job_id: str
    message: PrefillDone | PrefillFailed
    kv_here: bool


class Worker:
    """One prefill node; sessions come and go.

    refusal: why it, or we, last said no; empty once a session opens. misfit: it has never had a session and
    will not have one.
    """

    def __init__(self, name: str, dead_after_ms: int) -> None:
        self.name = name
        self.refusal = ""
        self.misfit = False
        self._dead_after_ms = dead_after_ms
        self._hello: HelloOk | None = None
        self._draining = False
        self._suspected = False
        self._closing = False
        self._peer_progress = 0
        self._progress_ms = 0
        self._lands = False
        self._grant_limit: int | None = None
        self.unusable_since_ms = 0
        self.ledger = SlotLedger()
        self.counters = {"orphans": 0, "late_completions": 0, "prefills_sent": 0, "sessions": 0}

    @property
    def session(self) -> str | None:
        return None if self._hello is None else self._hello.session

    @property
    def max_tokens(self) -> int | None:
        """What a slot of the open session holds."""
        return None if self._hello is None else self._hello.profile.max_tokens

    @property
    def profile(self) -> NodeProfile | None:
        """What the prefill node said of itself in the open session."""
        return None if self._hello is None else self._hello.profile

    @property
    def usable(self) -> bool:
        """Open and not about to close, not draining, not silent, at least one slot granted."""
        barred = self._closing or self._draining or self._suspected
        willing = self._hello is not None and not barred
        return willing and self.ledger.granted_count > 0

    @property
    def work_count(self) -> int:
        """Productions that are held or still owed."""
        return self.ledger.live_count + len(self.orphans)

    def knows(self, session: str) -> bool:
        """Whether the session is open, or slots of it have survived its end."""
        return session == self.session or any(slot.session == session for slot in self.ledger.survivors())

    def slow(self, now_ms: int) -> bool:
        """Whether work is there and half the time has passed after which it counts as hung."""
        if self._hello is None or not self._owes():
            return False
        return now_ms - self._progress_ms >= self._stall_bound_ms() // 2

    @property
    def orphans(self) -> list[GrantedSlot]:
        return [slot for slot in self.ledger.slots() if slot.state is SlotState.ORPHANED]

    def opened(self, hello: HelloOk, now_ms: int) -> None:
        """A session has begun."""
        self.ledger.open(hello.session, hello.incarnation, hello.grants, now_ms)
        self._hello = hello
        self.refusal = ""
        self.misfit = False
        self._draining = False
        self._suspected = False
        self._closing = False
        self._progress_ms = now_ms
        self._peer_progress = 0
        self._lands = hello.bulk is not None
        self._grant_limit = None
        self.counters["sessions"] += 1

    def refused(self, refusal: HelloRefused) -> None:
        """The node, or the mapping of its slab, said no."""
        self.refusal = refusal.detail
        self.misfit = not refusal.temporary and self.counters["sessions"] == 0

    def on_suspected(self, event: WorkerSuspected, now_ms: int) -> list[Any]:
        """The prefill node has fallen silent, or speaks again: new work waits meanwhile."""
        if event.session == self.session:
            self._suspected = event.silent
            self.unusable_since_ms = now_ms
        return []

    def lost(self, session: str, now_ms: int) -> tuple[list[str], list[Any]]:
        """The session has ended: ids of jobs whose future resolves PEER_LOST, and effects."""
        check(session == self.session, "a session that was not open has ended")
        self._hello = None
        self.unusable_since_ms = now_ms
        lost_jobs = self.ledger.close()
        return lost_jobs, self._unmap_if_unused(session)

    def send_prefill(
        self,
        slot: GrantedSlot,
        job_id: str,
        prompt: bytes,
        prompt_digest: str,
        budget_ms: int,
        now_ms: int,
        send_from: int = 0,
        cache_digest: bytes = b"",
        urgent: bool = False,
    ) -> tuple[Reservation, list[Any]]:
        """Reserve a slot and send the PREFILL that fills it."""
        if not self._owes():
            self._progress_ms = now_ms
        reservation = self.ledger.reserve(slot, job_id, now_ms, not self._lands, urgent)
        self.counters["prefills_sent"] += 1
        request = Prefill(
            job_id,
            slot.index,
            reservation.epoch,
            prompt,
            prompt_digest,
            send_from,
            budget_ms,
            cache_digest,
            urgent,
        )
        return reservation, [SendToWorker(reservation.session, request)]

    def receive(self, session: str, message: Any, now_ms: int) -> tuple[Completion | None, list[Any]]:
        """A message of the session: the completion for a live job, if it is one, and effects."""
        if session != self.session:
            return None, []
        if isinstance(message, (PrefillDone, PrefillFailed)):
            return self._complete(message, now_ms)
        if isinstance(message, Pong):
            if message.progress != self._peer_progress:
                self._peer_progress = message.progress
                self._progress_ms = now_ms
            return None, []
        if isinstance(message, Grant) and self.ledger.grant(message.grants, now_ms):
            return None, []
        if isinstance(message, GrantLimit):
            self._grant_limit = message.slots
            return None, []
        if isinstance(message, Draining):
            self._draining = True
            self.unusable_since_ms = now_ms
            return None, self._goodbye_if_drained()
        return None, [self._protocol_error(f"{type(message).__name__} is not expected here")]

    def give_back(self) -> list[Any]:
        """Return the FREE slots that others are to have; those in use follow when they are FREE."""
        if self._grant_limit is None or self._closing or self._hello is None:
            return []
        returned = self.ledger.give_back(self._grant_limit)
        return [SendToWorker(self.session, ReturnSlots(returned))] if returned else []

    def hurry(self, slot: GrantedSlot) -> list[Any]:
        """A lane has come to wait for what is produced in that slot of the open session."""
        if self._closing:
            return []
        slot.urgent = True
        return [SendToWorker(slot.session, Hurry(slot.index, slot.last_epoch))]

    def detach(self, reservation: Reservation, cause: str, now_ms: int) -> list[Any]:
        """The job lets go of its reservation, wherever the slot stands. IMPORTING waits for the copy."""
        slot = self.ledger.find(reservation)
        if slot is None or slot.state is SlotState.IMPORTING:
            return []
        with_record = slot.state is SlotState.PRODUCING and slot.record_here
        self.ledger.advance(
            slot, SlotEvent.DETACHED_WITH_RECORD if with_record else SlotEvent.JOB_DETACHED, now_ms
        )
        if slot.state is SlotState.FREE:
            return self._freed(reservation) + self._goodbye_if_drained()
        slot.cause = cause
        self.counters["orphans"] += 1
        return [SendToWorker(reservation.session, Cancel(reservation.slot, reservation.epoch))]

    def kv_moved(self, reservation: Reservation, now_ms: int) -> None:
        """KV of a production is on its way: the deadline for what is missing moves along."""
        slot = self.ledger.find(reservation)
        if reservation.session == self.session and slot is not None and slot.state in _OWING:
            self._progress_ms = now_ms
            if slot.record_here:
                slot.since_ms = now_ms

    def chunks_landed(self, reservation: Reservation, now_ms: int) -> tuple[str | None, list[Any]]:
        """All KV of a production has come over the bulk socket: the job whose slot is READY now, effects."""
        slot = self.ledger.find(reservation)
        if reservation.session != self.session or slot is None or slot.state is not SlotState.PRODUCING:
            return None, []  # let go of meanwhile
        slot.chunks_here = True
        self._progress_ms = now_ms
        if not slot.record_here:
            return None, []
        self.ledger.advance(slot, SlotEvent.COMPLETED, now_ms)
        return slot.job_id, self._goodbye_if_drained()

    def import_started(self, reservation: Reservation, now_ms: int) -> None:
        """The copy of a READY slot begins."""
        self._held(reservation, SlotEvent.IMPORT_STARTED, now_ms)

    def copy_ended(self, reservation: Reservation, now_ms: int) -> list[Any]:
        """The copy has ended, good or bad: the slot is nobody's."""
        self._held(reservation, SlotEvent.COPY_ENDED, now_ms)
        return self._freed(reservation)

    def expire(self, now_ms: int) -> list[Any]:
        """End the session when an orphan is overdue or the peer makes no progress with its work."""
        deadline_ms = self.deadline_ms()
        if deadline_ms is None or now_ms < deadline_ms:
            return []
        return [self._close(self._overdue(now_ms))]

    def deadline_ms(self) -> int | None:
        """When `expire` may have something to do."""
        if self._hello is None or not self._owes():
            return None
        bounds = [slot.since_ms + self._orphan_bound_ms() for slot in self.orphans]
        bounds += [slot.since_ms + self._dead_after_ms for slot in self._incomplete()]
        return min(bounds + [self._progress_ms + self._stall_bound_ms()])

    def status(self, now_ms: int) -> dict[str, Any]:
        """Plain values for STATUS."""
        return {
            "worker": self.name,
            "session": self.session,
            "refusal": self.refusal,
            "misfit": self.misfit,
            "usable": self.usable,
            "kv_plane": None if self._hello is None else (TCP if self._lands else SHM),
            "draining": self._draining,
            "suspected": self._suspected,
            "slots": [self._describe(slot, now_ms) for slot in self.ledger.slots()],
            "survivors": [self._describe(slot, now_ms) for slot in self.ledger.survivors()],
            "orphans": len(self.orphans),
            "progress_age_ms": now_ms - self._progress_ms if self._owes() else None,
            "counters": dict(self.counters),
        }

    def _describe(self, slot: GrantedSlot, now_ms: int) -> dict[str, Any]:
        age_ms = now_ms - slot.since_ms
        described = {
            "slot": slot.index,
            "epoch": slot.last_epoch,
            "state": str(slot.state),
            "job": slot.job_id,
            "age_ms": age_ms,
            "cause": slot.cause,
        }
        if slot.state is SlotState.ORPHANED:
            left_ms = self._orphan_bound_ms() - age_ms
            described["ends_by"] = f"the producer's completion, or the session's end in {left_ms} ms"
        return described

    def _complete(
        self, message: PrefillDone | PrefillFailed, now_ms: int
    ) -> tuple[Completion | None, list[Any]]:
        self._progress_ms = now_ms
        reservation = Reservation(self.session, message.slot, message.epoch)
        slot = self.ledger.find(reservation)
        if slot is None or slot.state not in _OWING or slot.record_here:
            place = f"slot {message.slot}, epoch {message.epoch}"
            return None, [self._protocol_error(f"a completion for {place} that owes none")]
        if slot.job_id != message.job_id:
            return None, [self._protocol_error("a completion that names another job")]
        done = isinstance(message, PrefillDone)
        orphaned = slot.state is SlotState.ORPHANED
        job_id = slot.job_id
        if done and not orphaned and not slot.chunks_here:
            slot.record_here, slot.since_ms = True, now_ms
            return Completion(reservation, job_id, message, kv_here=False), []
        self.ledger.advance(slot, SlotEvent.COMPLETED if done else SlotEvent.PRODUCER_FAILED, now_ms)
        if orphaned:
            self.counters["late_completions"] += 1
            release = self._freed(reservation) if done else []
            return None, release + self._goodbye_if_drained()
        return Completion(reservation, job_id, message, kv_here=done), self._goodbye_if_drained()

    def _held(self, reservation: Reservation, event: SlotEvent, now_ms: int) -> None:
        slot = self.ledger.find(reservation)
        check(slot is not None, "a job uses a slot that it does not hold")
        self.ledger.advance(slot, event, now_ms)

    def _freed(self, reservation: Reservation) -> list[Any]:
        """A slot with a record was let go: tell the producer, or drop the mapping of an ended session."""
        if reservation.session == self.session:
            return [SendToWorker(reservation.session, Release(reservation.slot, reservation.epoch))]
        return self._unmap_if_unused(reservation.session)

    def _unmap_if_unused(self, session: str) -> list[Any]:
        used = any(slot.session == session for slot in self.ledger.survivors())
        return [] if used else [ClosePlane(session)]

    def _owes(self) -> bool:
        return any(slot.state in _OWING for slot in self.ledger.slots())

    def _goodbye_if_drained(self) -> list[Any]:
        """A draining prefill node waits for our BYE; it comes once nothing is owed."""
        if not self._draining or self._closing or self._owes():
            return []
        return [self._close("the prefill node drains and owes nothing")]

    def _orphan_bound_ms(self) -> int:
        return self._hello.stall_ms + self._dead_after_ms + limits.ORPHAN_GRACE_MS

    def _stall_bound_ms(self) -> int:
        # The hung node itself exits at stall_ms; its own word comes first.
        return self._hello.stall_ms + limits.ORPHAN_GRACE_MS

    def _incomplete(self) -> list[GrantedSlot]:
        """Slots whose record is here and whose chunks are not, for which there is a deadline."""
        return [slot for slot in self.ledger.slots() if slot.state in _OWING and slot.record_here]

    def _overdue(self, now_ms: int) -> str:
        bound_ms = self._orphan_bound_ms()
        for slot in self.orphans:
            if now_ms - slot.since_ms >= bound_ms:
                return f"slot {slot.index}: no completion {now_ms - slot.since_ms} ms after its CANCEL"
        for slot in self._incomplete():
            if now_ms - slot.since_ms >= self._dead_after_ms:
                return f"slot {slot.index}: KV is missing {now_ms - slot.since_ms} ms after its record"
        return f"no progress for {now_ms - self._progress_ms} ms although work is there"

    def _protocol_error(self, detail: str) -> CloseWorker:
        return self._close(f"{ErrorCode.PROTOCOL_ERROR}: {detail}")

    def _close(self, reason: str) -> CloseWorker:
        """End the session; nothing more is sent into it meanwhile."""
        self._closing = True
        return CloseWorker(self.session, reason)
