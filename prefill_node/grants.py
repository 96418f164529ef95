"""Which decode nodes have a session, and which slots of the slab each of them holds.

Decides who is granted what: all sessions the same share of the slab, at most `slots_per_session`; who holds
more, because others came later, is told its share and gives slots back as they become free. Called by the
prefill core alone. It must never hand on a slot that compute still writes to, or that a session still uses:
an ABANDONED slot is not in the pool until compute has answered, a granted one not until it is returned.
"""

from collections.abc import Iterator

from common.errors import check
from common.lifecycle import SourceEvent, SourceState
from common.messages import SlotGrant
from prefill_node.production import SourceSlot

_UNGRANTED = (SourceState.POOL, SourceState.ABANDONED)
_PRODUCING = (
    SourceState.QUEUED,
    SourceState.COMPUTING,
    SourceState.SENDING,
    SourceState.ABANDONED,
)


class Grants:
    """All slots of the slab, and the sessions they are granted to."""

    def __init__(self, slot_count: int, slots_per_session: int) -> None:
        self._slots = [SourceSlot(index) for index in range(slot_count)]
        self._slots_per_session = slots_per_session
        self._shares: dict[str, int] = {}

    @property
    def sessions(self) -> tuple[str, ...]:
        """Open sessions of decode nodes, oldest first."""
        return tuple(self._shares)

    def __iter__(self) -> Iterator[SourceSlot]:
        return iter(self._slots)

    def __getitem__(self, index: int) -> SourceSlot:
        return self._slots[index]

    def open(self, session: str, now_ms: int) -> tuple[SlotGrant, ...]:
        """A decode node has a session: what it is granted at once."""
        self._shares[session] = 0
        self._shares[session] = self._share_of(session)
        return self.share(now_ms).get(session, ())

    def close(self, session: str, now_ms: int) -> None:
        """The session has ended: its slots go back to the pool, at once or when compute lets go."""
        del self._shares[session]
        for slot in self.held_by(session):
            slot.advance(SourceEvent.SESSION_ENDED, now_ms)
            slot.session = None
            if slot.state is SourceState.POOL:
                slot.production = None

    def take_back(self, session: str, indices: tuple[int, ...], now_ms: int) -> bool:
        """A session returns idle slots to the pool; False when one of them is not its own, or not idle."""
        slots = [self.find(session, index) for index in dict.fromkeys(indices)]
        if any(slot is None or slot.state is not SourceState.IDLE for slot in slots):
            return False
        for slot in slots:
            slot.advance(SourceEvent.RETURNED, now_ms)
            slot.session = None
        return True

    def changed_shares(self) -> dict[str, int]:
        """Sessions whose share is not what they know, as others came or went; from now on they know."""
        shares = {session: self._share_of(session) for session in self._shares}
        changed = {session: share for session, share in shares.items() if share != self._shares[session]}
        self._shares = shares
        return changed

    def share(self, now_ms: int) -> dict[str, tuple[SlotGrant, ...]]:
        """Grant what lies in the pool; what each session gets, for those that get something."""
        granted: dict[str, tuple[SlotGrant, ...]] = {}
        for slot in self._slots:
            if slot.state is not SourceState.POOL or (session := self._neediest()) is None:
                continue
            slot.advance(SourceEvent.GRANTED, now_ms)
            slot.session = session
            granted[session] = (*granted.get(session, ()), SlotGrant(slot.index, slot.last_epoch))
        return granted

    def find(self, session: str, index: int) -> SourceSlot | None:
        """A slot that this session holds."""
        slot = self._slots[index] if index < len(self._slots) else None
        return slot if slot is not None and slot.session == session else None

    def held_by(self, session: str) -> list[SourceSlot]:
        return [slot for slot in self._slots if slot.session == session]

    def check(self) -> None:
        """INV-2, INV-4 and INV-5 for slots and sessions alone."""
        for slot in self._slots:
            check((slot.session is None) == (slot.state in _UNGRANTED), "INV-4: a slot is granted, or is not")
            check(slot.session is None or slot.session in self._shares, "INV-5: a slot of no open session")
            check((slot.production is not None) == (slot.state in _PRODUCING), "INV-4: production and state")
        for session in self._shares:
            check(
                len(self.held_by(session)) <= self._slots_per_session, "INV-6: a session has too many slots"
            )

    def _share_of(self, session: str) -> int:
        """Its part of the slab; what does not divide goes to the oldest sessions."""
        sessions = self.sessions
        even, rest = divmod(len(self._slots), len(sessions))
        return min(self._slots_per_session, even + (sessions.index(session) < rest))

    def _neediest(self) -> str | None:
        """The session with the fewest slots that may have more; the oldest of several."""
        wanting = [name for name, share in self._shares.items() if len(self.held_by(name)) < share]
        return min(wanting, key=lambda name: len(self.held_by(name)), default=None)
