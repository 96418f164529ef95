"""The bulk side of a simulated pair: connections that carry KV, what is sent on them, and where it lands.

A piece that was sent without a copy is read from its slot at any time until its memory is let go of. Here it
is read as late as can be, when it arrives or is let go of: a slot that is written too early shows in what
arrives. Bulk messages travel as they are, without the codec.
"""

from collections import deque

from tests.sim import memory
from tests.sim.links import Wire
from tests.sim.memory import Slab
from tests.sim.plan import CHUNK_TOKENS
from transport.bulk import BULK_ROUTE
from transport.peers import SendFrame

BATCH = 8


class Parcel:
    """A piece on its way. content: what was read of its slot, None while nothing was."""

    __slots__ = ("content", "frame", "slab")

    def __init__(self, frame: SendFrame, slab: Slab) -> None:
        self.frame = frame
        self.slab = slab
        self.content: int | None = None

    def read(self) -> int:
        """Its KV: as the slot holds it now, unless it was read before."""
        if self.content is None:
            piece = self.frame.message
            self.content = self.slab.read(piece.slot, chunk_of(piece.start))
        return self.content


class BulkWire(Wire):
    """The bulk connection of one session. `up` holds (session, sequence, message), `down` parcels.

    up_cut, down_cut: nothing passes in that direction, and nobody is told.
    """

    __slots__ = ("down_cut", "session", "up_cut")

    def __init__(self, number: int, dealer: str, router: str, session: str) -> None:
        super().__init__(number, dealer, router, BULK_ROUTE)
        self.session = session
        self.up_cut = self.down_cut = False


class BulkSource:
    """The prefill node's end. reading: parcels whose memory is not let go of, in the order of the sends."""

    __slots__ = ("closing", "reading", "wire")

    def __init__(self) -> None:
        self.wire: BulkWire | None = None
        self.reading: deque[Parcel] = deque()
        self.closing = False

    def close(self) -> None:
        """What was not let go of is never sent; it may be read for a while yet."""
        self.closing = True
        if self.wire is not None:
            unsent = {id(parcel) for parcel in self.reading}
            gone = [parcel for parcel in self.wire.down if id(parcel) not in unsent]
            self.wire.break_off(0, len(gone))
            self.wire = None


class Landing(Slab):
    """Landing memory of one session. landed: tokens of layers that each slot holds of its production."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.landed = [0] * slots

    def begin(self, slot: int, epoch: int) -> None:
        """A new production will land in the slot."""
        super().begin(slot, epoch)
        self.chunks[slot].clear()
        self.landed[slot] = 0

    def land(self, parcel: Parcel) -> None:
        """A chunk is whole when all its pieces were read from the same content."""
        piece = parcel.frame.message
        slot, start, content = piece.slot, chunk_of(piece.start), parcel.read()
        known = self.chunks[slot].get(start)
        if known is not None and known != content:
            content = memory.mix(known, content) | memory.TORN
        self.write(slot, start, content)
        self.landed[slot] += (piece.end - piece.start) * piece.layer_count


def chunk_of(position: int) -> int:
    """Where the chunk of a position begins."""
    return position - position % CHUNK_TOKENS
