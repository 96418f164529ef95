"""What must hold in the decode core after every step.

Decides nothing; called through `DecodeCore.check`, in tests and simulation after each step, in the daemon now
and then. It re-derives from the parts what each of them claims, and must never change anything.
"""

from typing import TYPE_CHECKING

from common.errors import check
from common.lifecycle import JobState, LaneState, SlotState

if TYPE_CHECKING:
    from decode_node.core import DecodeCore


_WAITING = (JobState.TOKENIZING, JobState.QUEUED)
_ENDED = JobState.ENDED
_KEPT = (SlotState.PRODUCING, SlotState.READY)
_FILLED = (LaneState.PREFILLING, LaneState.DECODING)


def check_decode_core(core: "DecodeCore") -> None:
    """Raise `InvariantViolation` naming the broken invariant."""
    lanes, jobs = core.lanes, core.desk.live()
    ledgers = [worker.ledger for worker in core.workers]
    for ledger in ledgers:
        ledger.check()
    lanes.check()
    # An automatic depth may have been greater when they were sent.
    depth = core.workers.slot_count if core.route.prefetch_auto else core.route.prefetch_depth
    check(
        core.workers.live_count <= lanes.count + depth,
        "INV-6: more productions are held than lanes and depth allow",
    )
    waiting = sum(job.state in _WAITING for job in jobs)
    check(waiting == core.desk.waiting_count, "INV-6: the count of waiting jobs is wrong")
    for job in jobs:
        check(job.state is not _ENDED, "INV-7: an ended job is still kept")
        if job.reservation is not None:
            slot = core.workers.holder(job.reservation).ledger.find(job.reservation)
            check(slot is not None and slot.job_id == job.job_id, "INV-2: a job without its slot")
        if job.lane is not None:
            check(lanes[job.lane].job_id == job.job_id, "INV-2: a job without its lane")
    core.cache.check()
    if core.cache.on:
        holders = sum(each.prefix is not None for each in (*jobs, *lanes)) + core.cache_orders.lock_count
        check(core.cache.index.status()["locks"] == holders, "INV-4: a prefix is locked for nobody")
    for ledger in ledgers:
        for slot in (*ledger.slots(), *ledger.survivors()):
            if slot.state in _KEPT:
                job = core.desk.get(slot.job_id)
                held = job is not None and job.reservation is not None and slot.holds(job.reservation)
                check(held, "INV-4: a slot is kept for a job that does not hold it")
    for lane in lanes:
        if lane.state in _FILLED:
            job = core.desk.get(lane.job_id)
            check(job is not None and job.lane == lane.index, "INV-4: a lane is kept for a job that left it")
