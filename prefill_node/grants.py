"""Which decode nodes have a session, and which slots of the slab each of them holds.

Decides who is granted what: every session at most `slots_per_session`, the one with fewest slots first; a
session may hold none and wait. Called by the prefill core alone. It must never hand on a slot that compute
still writes to: such a slot is ABANDONED, not in the pool, until compute has answered.
"""

from collections.abc import Iterator

from common.errors import check
from common.lifecycle import SourceEvent, SourceState
from common.messages import SlotGrant
from prefill_node.production import SourceSlot

_UNGRANTED = (SourceState.POOL, SourceState.ABANDONED)
_PRODUCING = (SourceState.QUEUED, SourceState.COMPUTING, SourceState.SENDING, SourceState.ABANDONED)


class Grants:
    """All slots of the slab, and the sessions they are granted to."""

    def __init__(self, slot_count: int, slots_per_session: int) -> None:
        self._slots = [SourceSlot(index) for index in range(slot_count)]
        self._slots_per_session = slots_per_session
        self._sessions: dict[str, None] = {}

    @property
    def sessions(self) -> tuple[str, ...]:
        """Open sessions of decode nodes, oldest first."""
        return tuple(self._sessions)

    def __iter__(self) -> Iterator[SourceSlot]:
        return iter(self._slots)

    def __getitem__(self, index: int) -> SourceSlot:
        return self._slots[index]

    def open(self, session: str, now_ms: int) -> tuple[SlotGrant, ...]:
        """A decode node has a session: what it is granted at once."""
        self._sessions[session] = None
        return self.share(now_ms).get(session, ())

    def close(self, session: str, now_ms: int) -> None:
        """The session has ended: its slots go back to the pool, at once or when compute lets go."""
        del self._sessions[session]
        for slot in self.held_by(session):
            slot.advance(SourceEvent.SESSION_ENDED, now_ms)
            slot.session = None
            if slot.state is SourceState.POOL:
                slot.production = None

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
            check(slot.session is None or slot.session in self._sessions, "INV-5: a slot of no open session")
            check((slot.production is not None) == (slot.state in _PRODUCING), "INV-4: production and state")
        for session in self._sessions:
            check(
                len(self.held_by(session)) <= self._slots_per_session, "INV-6: a session has too many slots"
            )

    def _neediest(self) -> str | None:
        """The session with the fewest slots that may have more; the oldest of several."""
        wanting = [name for name in self._sessions if len(self.held_by(name)) < self._slots_per_session]
        return min(wanting, key=lambda name: len(self.held_by(name)), default=None)
