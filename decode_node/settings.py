"""What the decode core is told of its process, once.

Decides nothing; made by the wiring from the configuration and the loaded engine, read by the core and the job
desk. It must never change while the node runs.
"""

from dataclasses import dataclass

from common.data_planes import SHM
from common.messages import NodeProfile
from decode_node.prefix_cache import PrefixSettings


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """Durations and limits: the flags of the same names.

    prefix: None without a prefix cache. planes: data planes that prefill nodes are asked for. chunk_us: what
    the engine takes for a chunk of a local prefill, 0 if that is not known.
    """

    incarnation: str
    profile: NodeProfile
    lease_ms: int
    dead_after_ms: int
    stall_ms: int
    drain_ms: int
    max_queue: int
    prefill_timeout_ms: int
    prefill_wait_ms: int
    prefill_retries: int
    job_timeout_ms: int
    prefix: PrefixSettings | None = None
    planes: tuple[str, ...] = (SHM,)
    chunk_us: int = 0
