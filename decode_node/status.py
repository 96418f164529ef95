"""What a decode node answers to STATUS.

Decides the keys, which docs/operations.md lists, and when the node calls itself ready; called by the core.
Plain values only, never prompt text, token ids or KV.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decode_node.core import DecodeCore


def decode_status(core: "DecodeCore", now_ms: int) -> dict[str, Any]:
    """The node's state as a tree of plain values."""
    states = [str(job.state) for job in core.desk.live()]
    return {
        "role": "decode",
        "accepting": core.accepting,
        "ready": core.accepting and not _held_up(core, now_ms),
        "draining": core.desk.draining,
        "idle": core.idle,
        "incarnation": core.settings.incarnation,
        "model": core.settings.profile.model_id,
        "max_tokens": core.desk.token_limit,
        "clients": len(core.desk.clients.sessions),
        "jobs": {state: states.count(state) for state in sorted(set(states))},
        "lanes": [{"lane": lane.index, "state": str(lane.state), "job": lane.job_id} for lane in core.lanes],
        "prefetch_depth": core.scheduler.depth(core.workers.granted_count),
        "prefetch_depth_asked": "auto" if core.route.prefetch_auto else core.route.prefetch_depth,
        "min_remote_prompt_tokens": core.scheduler.min_remote_tokens(core.desk.token_limit),
        "workers": [worker.status(now_ms) for worker in core.workers],
        "progress": core.watch.progress,
        "progress_age_ms": core.watch.age_ms(now_ms),
        "prefix_cache": core.cache.status(),
        "counters": core.counters,
    }


def _held_up(core: "DecodeCore", now_ms: int) -> bool:
    """Whether work does not get on: at a thread of this node, or at every usable prefill node."""
    usable = [worker for worker in core.workers if worker.usable]
    all_slow = bool(usable) and all(worker.slow(now_ms) for worker in usable)
    return core.watch.slow(now_ms) or core.desk.text_slow(now_ms) or all_slow
