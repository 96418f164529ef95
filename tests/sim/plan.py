"""What a simulated world consists of and what may happen in it: frozen values, no behaviour."""

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from common.data_planes import SHM
from common.kv_layout import KvLayout
from common.messages import NodeProfile
from transport.peers import LivenessTimes

CHUNK_TOKENS = 4
MAX_TOKENS = 32
VOCABULARY = 4
PROFILE = NodeProfile(
    "numbers", "weights", "tokenizer", 1, 1, 1, VOCABULARY, "uint8", "half", MAX_TOKENS, CHUNK_TOKENS
)
# KV so large that a chunk travels in pieces, see `transport.bulk`: each layer for itself; each token for
# itself, and a chunk of them takes all credit; the same, and each of them takes it. None of it is stored.
LAYERED = replace(PROFILE, layers=2, head_dim=2**17)
CUT = replace(PROFILE, head_dim=2**20)
HUGE = replace(PROFILE, head_dim=2**22)
TIMES = LivenessTimes(
    ping_ms=200,
    suspect_ms=450,
    dead_after_ms=600,
    lease_ms=1_000,
    hello_timeout_ms=200,
    backoff_min_ms=50,
    backoff_max_ms=400,
)
NEVER_MS = 10**9


class Option(NamedTuple):
    """One thing that can happen next; a run is a list of these.

    kind: a usual step ("deliver", "time", "compute", "mail", "text", "submit", "cancel", "restart",
    "continue", "mend", ...) or the name of a fault. where: a node, client or queue. detail, more: which of
    several variants.
    """

    kind: str
    where: str = ""
    detail: int = 0
    more: int = 0


@cache
def usual(kind: str, where: str | int, detail: int = 0) -> Option:
    """An option that comes again and again."""
    return Option(kind, str(where), detail)


@dataclass(frozen=True, slots=True)
class JobPlan:
    """One job. eos: a token divisible by `EOS_DIVISOR` ends it; stop: text may end it, see `memory`."""

    client: int
    prompt: tuple[int, ...]
    max_tokens: int
    eos: bool = False
    stop: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A world. faults: (name, how often at most) of `tests.sim.faults.FAULTS`.

    planes: how KV comes to the decode nodes, one after the other; the last counts for all further ones.
    codec: messages travel as the bytes of the production codec, through the production port. times: of
    sessions between nodes; client_times: of clients' sessions (exploration makes these endless).
    """

    jobs: tuple[JobPlan, ...]
    clients: int = 1
    decode_nodes: int = 1
    prefill_nodes: int = 1
    lanes: int = 1
    slots: int = 1
    slots_per_session: int | None = None
    depth: int = 1
    remote_only: bool = True
    policy: str = "fail"
    faults: tuple[tuple[str, int], ...] = ()
    planes: tuple[str, ...] = (SHM,)
    profile: NodeProfile = PROFILE
    codec: bool = True
    times: LivenessTimes = TIMES
    client_times: LivenessTimes = TIMES
    stall_ms: int = 2_000
    drain_ms: int = 3_000
    max_queue: int = 4
    prefill_timeout_ms: int = 1_500
    prefill_wait_ms: int = 1_500
    prefill_retries: int = 1
    job_timeout_ms: int = 5_000

    @property
    def layout(self) -> KvLayout:
        """Of a slot."""
        profile = self.profile
        return KvLayout(profile.layers, profile.kv_heads, profile.head_dim, profile.dtype, profile.max_tokens)

    @property
    def rest_bound_ms(self) -> int:
        """INV-7: when faults have stopped, nothing of an ended session is left after this time."""
        times = self.times
        return times.lease_ms + 2 * times.dead_after_ms + times.backoff_max_ms + self.stall_ms
