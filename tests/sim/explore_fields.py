"""What the canonical form of a world leaves out, by name, and when times count in it.

Decides what exploration takes for the past: an attribute listed here cannot change what may happen next, and
each says why. Read by `tests.sim.canonical` and by the test that holds these lists against the classes. An
attribute that is not listed counts.
"""

from collections.abc import Callable
from typing import Any

from common.lifecycle import SlotState
from decode_node import (
    clients,
    compute_watch,
    core,
    desk,
    jobs,
    lanes,
    scheduler,
    slots,
    stack,
    timers,
    worker,
    workers,
)
from prefill_node import core as prefill_core
from prefill_node import grants, line, production
from prefill_node import stack as prefill_stack
from tests.sim import (
    audit,
    bulk,
    client_process,
    decode_device,
    decode_process,
    links,
    memory,
    prefill_process,
)
from tests.sim import world as sim_world
from tests.sim.plan import NEVER_MS
from transport import bulk as bulk_rules
from transport import connector, listener, peers

STATISTICS = "counted or timed for people alone"
CONSTANT = "the same in every state of one exploration"
ELSEWHERE = "another attribute holds the same objects"
DRAWN = "the source of drawn names"
NO_PREFIX = "a prefix cache without places finds nothing"
SPECIAL = "walked by a function of its own"

_PROCESS = {
    "name": CONSTANT,
    "plan": CONSTANT,
    "incarnations": DRAWN,
    "offset_ms": "the process's own clock is what its times are measured by",
    "stopped_at_ms": SPECIAL,
    "slow_until_ms": SPECIAL,
}
EXCLUDED: dict[type, dict[str, str]] = {
    core.DecodeCore: {
        "settings": CONSTANT,
        "route": CONSTANT,
        "lane_work": ELSEWHERE,
        "handoff": ELSEWHERE,
        "cache": NO_PREFIX,
        "cache_orders": NO_PREFIX,
        "_handlers": ELSEWHERE,
    },
    desk.JobDesk: {
        "_settings": CONSTANT,
        "_scheduler": ELSEWHERE,
        "_workers": ELSEWHERE,
        "_lanes": ELSEWHERE,
        "_cache": NO_PREFIX,
        "_new_session_id": DRAWN,
        "_new_job_id": DRAWN,
        "_prepared_ms": STATISTICS,
        "counters": STATISTICS,
    },
    jobs.Job: {
        "since_ms": SPECIAL,
        "arrival_ms": STATISTICS,
        "first_token_ms": STATISTICS,
        "completion_tokens": STATISTICS,
        "text_moved_ms": STATISTICS,
        "path": STATISTICS,
        "prefill_queue_us": STATISTICS,
        "prefill_busy_us": STATISTICS,
        "decode_busy_us": STATISTICS,
        "copy_us": STATISTICS,
        "digest_us": STATISTICS,
        "lane_gap_us": STATISTICS,
        "stages_ms": SPECIAL,
        "kv_here": SPECIAL,
        "sent_to": "with one prefill node, none is preferred",
        "prompt": "follows from the label",
        "prompt_digest": "follows from the label",
        "sampling": "follows from the label",
    },
    workers.Workers: {"_affinity": "with one prefill node, none is preferred"},
    worker.Worker: {
        "name": CONSTANT,
        "_dead_after_ms": CONSTANT,
        "counters": STATISTICS,
        "refusal": STATISTICS,
        "_peer_progress": SPECIAL,
        "unusable_since_ms": SPECIAL,
    },
    slots.GrantedSlot: {"cause": STATISTICS, "record_here": SPECIAL, "chunks_here": SPECIAL},
    scheduler.Scheduler: {
        "route": CONSTANT,
        "pace": "asked only where the depth or the shortest remote prompt is automatic",
        "_pushes": "breaks ties of equal places, which a job has once",
        "_queued": SPECIAL,
        "_prefilled": SPECIAL,
    },
    timers.Timers: {"_heap": ELSEWHERE, "_deadlines": SPECIAL},
    compute_watch.ComputeWatch: {"_stall_ms": CONSTANT, "_lanes": ELSEWHERE, "progress": STATISTICS},
    connector.Connector: {
        "_times": CONSTANT,
        "_role": CONSTANT,
        "_profile": CONSTANT,
        "_planes": CONSTANT,
        "_memory_probe": CONSTANT,
        "_attempt": "what other attempts are measured by",
        "stale_messages": STATISTICS,
        "_handlers": ELSEWHERE,
    },
    listener.Listener: {
        "_times": CONSTANT,
        "_progress": ELSEWHERE,
        "stale_messages": STATISTICS,
        "_handlers": ELSEWHERE,
        "_attempts": SPECIAL,
    },
    peers.Session: {"sent": SPECIAL, "received": SPECIAL, "heard_ms": SPECIAL, "role": SPECIAL},
    prefill_core.PrefillCore: {
        "settings": CONSTANT,
        "_new_session_id": DRAWN,
        "hellos_refused": STATISTICS,
        "_handlers": ELSEWHERE,
    },
    line.ProductionLine: {
        "_settings": CONSTANT,
        "cache": NO_PREFIX,
        "_grants": ELSEWHERE,
        "progress": "what other counts of progress are measured by",
        "counters": STATISTICS,
    },
    grants.Grants: {"_slots_per_session": CONSTANT},
    production.SourceSlot: {"since_ms": STATISTICS},
    production.Production: {
        "started_ms": STATISTICS,
        "offered_ms": STATISTICS,
        "computed_ms": STATISTICS,
        "busy_us": STATISTICS,
        "prefix": NO_PREFIX,
    },
    decode_process.DecodeProcess: {**_PROCESS, "port": ELSEWHERE},
    prefill_process.PrefillProcess: {**_PROCESS, "port": ELSEWHERE},
    client_process.ClientProcess: {**_PROCESS, "port": ELSEWHERE, "node": CONSTANT},
    links.Wire: {"number": DRAWN, "route": SPECIAL, "up": SPECIAL, "down": SPECIAL},
    sim_world.World: {
        "plan": CONSTANT,
        "now_ms": "times are measured by it",
        "steps": STATISTICS,
        "spins": STATISTICS,
        "wire_count": DRAWN,
        "slabs": "a slab is read through the mapping of a session",
        "wires": SPECIAL,
        "bulk": SPECIAL,
        "late": CONSTANT,
        "spoken": SPECIAL,
        "prefills": ELSEWHERE,
        "decodes": ELSEWHERE,
        "clients": ELSEWHERE,
        "audit": SPECIAL,
    },
    audit.Audit: {
        "plan": CONSTANT,
        "layers": CONSTANT,
        "statuses": STATISTICS,
        "heard": "follows from what each session has received",
        "out_of_order": "lasts for one delivery",
        "completions": "whether an epoch was completed follows from its slot on the prefill node",
        "tokens": SPECIAL,
        "answers": SPECIAL,
        "accepted": SPECIAL,
        "ended": SPECIAL,
        "crashed": SPECIAL,
        "sent_in": SPECIAL,
    },
    decode_device.Filling: {},
    decode_device.Sampler: {"sampling": "follows from the job"},
    decode_device.DecodeDevice: {"folded": SPECIAL},
    decode_device.TextDevice: {"streams": SPECIAL},
    memory.Slab: {},
    lanes.Lane: {},
    lanes.Lanes: {},
    clients.Clients: {},
    slots.SlotLedger: {},
    bulk_rules.BulkSender: {
        "_layout": CONSTANT,
        "_give_up_ms": CONSTANT,
        "_route": "the peer of the session's one connection, once BulkOpen is here",
        "_sent": SPECIAL,
        "_received": SPECIAL,
        "_told_ms": SPECIAL,
        "_productions": SPECIAL,
        "stale_messages": STATISTICS,
        "_handlers": ELSEWHERE,
    },
    bulk_rules.BulkReceiver: {
        "_layout": CONSTANT,
        "_chunk_tokens": CONSTANT,
        "_sent": SPECIAL,
        "_received": SPECIAL,
        "_told_ms": SPECIAL,
        "fenced_pieces": STATISTICS,
        "_handlers": ELSEWHERE,
    },
    bulk_rules._Arrival: {},
    bulk.Parcel: {"frame": SPECIAL},
    bulk.BulkWire: {"number": DRAWN, "route": CONSTANT, "up": SPECIAL, "down": SPECIAL},
    bulk.BulkSource: {},
    bulk.Landing: {},
    stack.DecodeStack: {"_handlers": ELSEWHERE},
    prefill_stack.PrefillStack: {"_layout": CONSTANT, "_give_up_ms": CONSTANT, "_handlers": ELSEWHERE},
    links.RouterEnd: {},
    links.DealerEnd: {},
    links.PlainPort: {},
}
IN_MESSAGES = {
    "detail": "for people",
    "reason": "for people",
    "cause": "for people",
    "profile": CONSTANT,
    "plane": CONSTANT,
    "sampling": "follows from the job",
    "submit": "follows from the job",
    "token_limit": CONSTANT,
    "timings": STATISTICS,
    "usage": STATISTICS,
    "last_sequence": STATISTICS,
    "progress": SPECIAL,
    "attempt": SPECIAL,
}
"""Fields of messages, events and commands that are left out, besides those whose name ends in `_us`."""

INSTANTS = {
    "since_ms",
    "arrived_ms",
    "_progress_ms",
    "_moved_ms",
    "_pinged_ms",
    "_next_attempt_ms",
    "_hello_deadline_ms",
    "_drain_deadline_ms",
    "chunk_started_ms",
}
DURATIONS = {"_backoff_ms", "lease_ms", "stall_ms", "budget_ms"}
RELEVANT_MS: dict[tuple[type, str], Callable[[Any], bool]] = {
    (slots.GrantedSlot, "since_ms"): lambda slot: (
        slot.state is SlotState.ORPHANED or (slot.state is SlotState.PRODUCING and slot.record_here)
    ),
    (worker.Worker, "_progress_ms"): lambda node: node._owes(),
    (compute_watch.ComputeWatch, "_moved_ms"): lambda watch: watch.owes,
    (connector.Connector, "_pinged_ms"): lambda it: it._session is not None and it._times.ping_ms < NEVER_MS,
    (line.ProductionLine, "chunk_started_ms"): lambda it: it.computing is not None,
    (bulk_rules.BulkSender, "_moved_ms"): lambda it: it.deadline_ms() is not None,
}
