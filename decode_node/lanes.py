"""The lanes of the decode engine, as the core sees them.

Decides which lane is free and who has the others; changed by the core alone. A lane is free until its import
starts, and again only when compute has said that it let go: until then its memory may be read or written.
"""

from dataclasses import dataclass

from common.errors import check
from common.lifecycle import LANE_TRANSITIONS, LaneEvent, LaneState, advance
from common.prefix_index import HeldPrefix
from decode_node.slots import Reservation

_FREE = LaneState.FREE
_UNOWNED = (LaneState.FREE, LaneState.STOPPING)


@dataclass(slots=True)
class Lane:
    """One lane. job_id is None while FREE and STOPPING; reservation is the slot an import reads from.

    prefix: what it holds of the prefix cache while it copies from there.
    """

    index: int
    state: LaneState = LaneState.FREE
    job_id: str | None = None
    reservation: Reservation | None = None
    prefix: HeldPrefix | None = None


class Lanes:
    """All lanes of one engine."""

    def __init__(self, count: int) -> None:
        self._lanes = [Lane(index) for index in range(count)]
        self.free_count = count

    def free(self) -> Lane | None:
        """A lane that can be given to a job now, if any."""
        if not self.free_count:
            return None
        return next((lane for lane in self._lanes if lane.state is _FREE), None)

    def __getitem__(self, index: int) -> Lane:
        return self._lanes[index]

    def __iter__(self):
        return iter(self._lanes)

    def advance(self, lane: Lane, event: LaneEvent, job_id: str | None = None) -> None:
        """Follow the table; `job_id` is the new occupant for the events that start something."""
        was_free = lane.state is _FREE
        lane.state = advance(LANE_TRANSITIONS, lane.state, event)
        self.free_count += (lane.state is _FREE) - was_free
        if lane.state in _UNOWNED:
            lane.job_id = None
        elif job_id is not None:
            lane.job_id = job_id

    @property
    def count(self) -> int:
        return len(self._lanes)

    def check(self) -> None:
        """INV-1 and INV-2 for the lanes alone."""
        free = sum(lane.state is _FREE for lane in self._lanes)
        check(free == self.free_count, "INV-1: the count of free lanes is wrong")
        owners = [lane.job_id for lane in self._lanes if lane.job_id is not None]
        check(len(owners) == len(set(owners)), "INV-2: a job has two lanes")
        for lane in self._lanes:
            occupied = lane.state not in _UNOWNED
            check((lane.job_id is not None) == occupied, "INV-2: a lane's owner and state disagree")
