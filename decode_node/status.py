"""What a decode node answers to STATUS.

Decides the keys, which docs/operations.md lists; called by the core. Plain values only, never prompt text,
token ids or KV.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decode_node.core import DecodeCore

HANDOFF_COUNTERS = ("remote_imports", "prefetches", "kv_refused", "local_prefill_tokens")


def decode_status(core: "DecodeCore", now_ms: int) -> dict[str, Any]:
    """The node's state as a tree of plain values."""
    states = [str(job.state) for job in core.desk.live()]
    return {
        "role": "decode",
        "accepting": core.accepting,
        "draining": core.desk.draining,
        "idle": core.idle,
        "incarnation": core.settings.incarnation,
        "model": core.settings.profile.model_id,
        "max_tokens": core.desk.token_limit,
        "clients": len(core.desk.clients.sessions),
        "jobs": {state: states.count(state) for state in sorted(set(states))},
        "lanes": [{"lane": lane.index, "state": str(lane.state), "job": lane.job_id} for lane in core.lanes],
        "prefetch_depth": core.scheduler.depth(core.worker.ledger.granted_count),
        "prefetch_depth_asked": core.route.prefetch_depth,
        "worker": core.worker.status(now_ms),
        "worker_refusal": core.refusal,
        "progress": core.watch.progress,
        "counters": {**core.desk.counters, **core.counters},
    }
