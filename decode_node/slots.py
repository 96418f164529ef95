"""The slot ledger: who may use which source slot.

Decides the state of every slot granted to this decode node; changed by `decode_node.worker` alone, on behalf
of the core. It must never free a slot whose producer still owes a completion or whose copy still runs. The
table is `common.lifecycle.SLOT_TRANSITIONS`.

When a session ends, its FREE, PRODUCING and ORPHANED slots are gone. READY and IMPORTING ones become
survivors: their bytes are complete in shared memory, so the job may go on if they verify. While a survivor
lives, the slot of the same prefill incarnation and index is not reserved again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from common.errors import check
from common.lifecycle import SLOT_TRANSITIONS, SlotEvent, SlotState, advance
from common.messages import SlotGrant


@dataclass(frozen=True, slots=True)
class Reservation:
    """The right of one job to one production of one slot."""

    session: str
    slot: int
    epoch: int


@dataclass(slots=True)
class GrantedSlot:
    """One slot of the ledger. job_id is None while FREE and, in effect, while ORPHANED (kept for people).

    urgent: a lane waits for its production, and the producer knows. record_here, chunks_here: which of the
    two that make a PRODUCING slot READY have arrived; where the slot is read in shared memory, the chunks are
    there with the record.
    """

    session: str
    incarnation: str
    index: int
    last_epoch: int
    state: SlotState = SlotState.FREE
    job_id: str | None = None
    since_ms: int = 0
    cause: str = ""
    urgent: bool = False
    record_here: bool = False
    chunks_here: bool = False

    @property
    def reservation(self) -> Reservation:
        return Reservation(self.session, self.index, self.last_epoch)

    def holds(self, reservation: Reservation) -> bool:
        """Whether this is the slot of that reservation."""
        return (
            self.last_epoch == reservation.epoch
            and self.session == reservation.session
            and self.index == reservation.slot
        )


# Named once: Python 3.11 looks a member of an enumeration up four times as slowly as a global.
_FREE = SlotState.FREE
_SURVIVING = (SlotState.READY, SlotState.IMPORTING)
_LIVE = (SlotState.PRODUCING, *_SURVIVING)


class SlotLedger:
    """All granted slots of the open session, and the survivors of ended ones."""

    def __init__(self) -> None:
        self._slots: dict[int, GrantedSlot] = {}
        self._survivors: dict[Reservation, GrantedSlot] = {}
        self._session: str | None = None
        self._incarnation = ""
        self.granted_count = 0

    def open(self, session: str, incarnation: str, grants: tuple[SlotGrant, ...], now_ms: int = 0) -> None:
        """Begin the ledger of a new session."""
        check(self._session is None, "a session opened while another one is open")
        self._session = session
        self._incarnation = incarnation
        self.grant(grants, now_ms)

    def grant(self, grants: tuple[SlotGrant, ...], now_ms: int = 0) -> bool:
        """Take more slots; False when one of them was granted already: the peer's mistake."""
        if any(grant.slot in self._slots for grant in grants):
            return False
        for grant in grants:
            slot = GrantedSlot(
                self._session, self._incarnation, grant.slot, grant.last_epoch, since_ms=now_ms
            )
            self._slots[grant.slot] = slot
        self.granted_count += len(grants)
        return True

    def give_back(self, limit: int) -> tuple[int, ...]:
        """Let go of FREE slots until at most `limit` slots are left, if there are so many; which they are."""
        free = [slot.index for slot in self._slots.values() if slot.state is _FREE]
        returned = tuple(free[: max(0, self.granted_count - limit)])
        for index in returned:
            del self._slots[index]
        self.granted_count -= len(returned)
        return returned

    def close(self) -> list[str]:
        """End the session; ids of the jobs whose completion will never come."""
        lost = [slot.job_id for slot in self._slots.values() if slot.state is SlotState.PRODUCING]
        for slot in self._slots.values():
            if slot.state in _SURVIVING:
                self._survivors[slot.reservation] = slot
        self._slots.clear()
        self.granted_count = 0
        self._session = None
        return lost

    def reservable(self) -> GrantedSlot | None:
        """A slot that may be reserved now, if any."""
        taken = {(slot.incarnation, slot.index) for slot in self._survivors.values()}
        for slot in self._slots.values():
            if slot.state is _FREE and (slot.incarnation, slot.index) not in taken:
                return slot
        return None

    def reserve(
        self, slot: GrantedSlot, job_id: str, now_ms: int, chunks_here: bool = True, urgent: bool = False
    ) -> Reservation:
        """Give a reservable slot to a job, under a greater epoch. chunks_here: none will have to land."""
        self._advance(slot, SlotEvent.RESERVED, now_ms)
        slot.last_epoch += 1
        slot.job_id = job_id
        slot.cause = ""
        slot.urgent = urgent
        slot.record_here, slot.chunks_here = False, chunks_here
        return slot.reservation

    def find(self, reservation: Reservation) -> GrantedSlot | None:
        """The slot of a reservation that still holds it."""
        slot = self._slots.get(reservation.slot)
        if slot is not None and slot.holds(reservation) and slot.state is not _FREE:
            return slot
        return self._survivors.get(reservation)

    def advance(self, slot: GrantedSlot, event: SlotEvent, now_ms: int) -> SlotState:
        """Follow the table; the new state."""
        self._advance(slot, event, now_ms)
        if slot.state is _FREE:
            slot.job_id = None
            self._survivors.pop(slot.reservation, None)
        return slot.state

    def slots(self) -> Iterator[GrantedSlot]:
        """Slots of the open session."""
        return iter(self._slots.values())

    def survivors(self) -> Iterator[GrantedSlot]:
        """Slots of ended sessions that are still wanted."""
        return iter(self._survivors.values())

    @property
    def survivor_count(self) -> int:
        return len(self._survivors)

    @property
    def importing_count(self) -> int:
        """Slots that are being copied into a lane."""
        return sum(slot.state is SlotState.IMPORTING for slot in (*self.slots(), *self.survivors()))

    @property
    def live_count(self) -> int:
        """PRODUCING, READY and IMPORTING, survivors included."""
        return len(self._survivors) + sum(slot.state in _LIVE for slot in self._slots.values())

    @property
    def idle(self) -> bool:
        """No slot is in anybody's use."""
        return not self._survivors and all(slot.state is _FREE for slot in self._slots.values())

    def check(self) -> None:
        """INV-1 and INV-2 for the ledger alone."""
        check(
            len(self._slots) == self.granted_count, "INV-1: a granted slot has vanished, or come from nowhere"
        )
        for slot in self._slots.values():
            check((slot.job_id is None) == (slot.state is _FREE), "INV-2: a slot without owner")
            check(slot.session == self._session, "INV-5: a slot of another session in the ledger")
        for survivor in self._survivors.values():
            check(survivor.state in _SURVIVING, "INV-1: survivor in a wrong state")

    def _advance(self, slot: GrantedSlot, event: SlotEvent, now_ms: int) -> None:
        slot.state = advance(SLOT_TRANSITIONS, slot.state, event)
        slot.since_ms = now_ms
