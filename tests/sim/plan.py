"""What a simulated world consists of and what may happen in it: frozen values, no behaviour."""

from dataclasses import dataclass
from typing import NamedTuple

from common.messages import NodeProfile
from transport.peers import LivenessTimes

CHUNK_TOKENS = 4
MAX_TOKENS = 32
VOCABULARY = 4
TOKEN_BYTES = 2
PROFILE = NodeProfile(
    "numbers", "weights", "tokenizer", 1, 1, 1, VOCABULARY, "uint8", "half", MAX_TOKENS, CHUNK_TOKENS
)
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
    def rest_bound_ms(self) -> int:
        """INV-7: when faults have stopped, nothing of an ended session is left after this time."""
        times = self.times
        return times.lease_ms + 2 * times.dead_after_ms + times.backoff_max_ms + self.stall_ms
