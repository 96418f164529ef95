"""Names of everything that Tandem logs.

Decides the vocabulary and nothing else: an entry of the log is one of these names and its fields. Names are
stable, because people search for them; `docs/operations.md` lists them. Prose belongs in the documentation,
never here.
"""

from enum import StrEnum


class LogEvent(StrEnum):
    """What happened: the thing, a dot, the past participle."""

    NODE_CONFIGURED = "node.configured"
    NODE_LOADING = "node.loading"
    NODE_BOUND = "node.bound"
    NODE_READY = "node.ready"
    NODE_DRAINING = "node.draining"
    NODE_STOPPED = "node.stopped"
    NODE_FAILED = "node.failed"
    REQUEST_FAILED = "request.failed"
    NODE_NOT_PINNED = "node.not_pinned"
    NODE_PAUSED = "node.paused"
    SIGNAL_RECEIVED = "signal.received"

    HELLO_REFUSED = "hello.refused"
    SESSION_OPENED = "session.opened"
    SESSION_ENDED = "session.ended"
    CLIENT_DENIED = "client.denied"
    PEER_PROTOCOL_ERROR = "peer.protocol_error"

    JOB_ACCEPTED = "job.accepted"
    JOB_REJECTED = "job.rejected"
    JOB_FINISHED = "job.finished"
    JOB_FAILED = "job.failed"
    KV_CONVERTED = "kv.converted"
    SLAB_REMOVED = "slab.removed"
    NO_SHARED_MEMORY = "slab.no_shared_memory"
    DEPTH_CLAMPED = "prefetch.depth_clamped"

    PREFILL_DONE = "prefill.done"
    PREFILL_FAILED = "prefill.failed"
    PREFILL_CANCELLED = "prefill.cancelled"
    COMPUTE_FAILED = "compute.failed"
    INVARIANT_VIOLATED = "invariant.violated"
    STORY_WRITTEN = "story.written"
    STORY_FAILED = "story.failed"

    HOOK_HELD = "hook.held"
    HOOK_RELEASED = "hook.released"
    WARNINGS_SUPPRESSED = "warnings.suppressed"
