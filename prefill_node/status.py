"""What a prefill node answers to STATUS.

Decides the keys, which docs/operations.md lists, and when the node calls itself ready; called by the core.
Plain values only, never prompt text, token ids or KV.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefill_node.core import PrefillCore


def prefill_status(core: "PrefillCore", now_ms: int) -> dict[str, Any]:
    """The node's state as a tree of plain values."""
    settings = core.settings
    computing_ms = None if core.line.computing is None else now_ms - core.line.chunk_started_ms
    slow = computing_ms is not None and computing_ms >= settings.stall_ms // 2
    return {
        "role": "prefill",
        "accepting": not core.draining,
        "ready": not core.draining and not slow,
        "draining": core.draining,
        "incarnation": settings.incarnation,
        "model": settings.profile.model_id,
        "max_tokens": settings.profile.max_tokens,
        "decode_sessions": list(core.grants.sessions),
        "clients": len(core.clients),
        "progress": core.line.progress,
        "progress_age_ms": computing_ms,
        "slots": [slot.status(now_ms) for slot in core.grants],
        "prefix_cache": core.line.cache.status() if core.line.cache.places else None,
        "queued": len(core.line.queue),
        "counters": {**core.line.counters, "hellos_refused": core.hellos_refused},
    }
