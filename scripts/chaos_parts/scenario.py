"""What a chaos run is made of: sizes, speeds and times, one set for each backend.

Decides how long prompts and answers are, how patient the nodes are with each other, and how often something
happens to them. Read by every other module of this package. The numbers of a real model are larger, because a
node of it needs seconds to start and a tenth of a second for a token.
"""

from dataclasses import dataclass

from transport.peers import LivenessTimes


@dataclass(frozen=True, slots=True)
class Scenario:
    """Sizes in tokens, times in milliseconds; pairs are the least and the greatest value that is drawn.

    kind: a key of `transport.launch.pair.BACKENDS`. node_flags: for both daemons. stall_ms: as the nodes have
    it. rest_ms: from the end of one disturbance of a node to the next. growth_mib: most that a daemon may
    grow once it has run for `warm_up_ms`.
    """

    kind: str
    times: LivenessTimes
    stall_ms: int
    drain_ms: int
    job_timeout_ms: int
    ready_ms: int
    rest_ms: tuple[int, int]
    token_ids: tuple[int, int]
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    questions: int
    clients: int
    warm_up_ms: int
    growth_mib: int
    node_flags: tuple[str, ...]
    speed_flags: tuple[str, ...] = ()

    def liveness_flags(self) -> list[str]:
        """Flags of both daemons that do not depend on the model."""
        times = self.times
        values = {
            "--ping-ms": times.ping_ms,
            "--suspect-ms": times.suspect_ms,
            "--dead-after-ms": times.dead_after_ms,
            "--lease-ms": times.lease_ms,
            "--stall-ms": self.stall_ms,
            "--drain-ms": self.drain_ms,
        }
        return [word for flag, value in values.items() for word in (flag, str(value))]

    @property
    def client_times(self) -> LivenessTimes:
        """A client outlasts every stop of its node: it gives up only when the node is really gone."""
        times = self.times
        patience_ms = 3 * times.lease_ms
        return LivenessTimes(times.ping_ms, patience_ms - 1_000, patience_ms, patience_ms + 1_000)


EMULATED = Scenario(
    kind="emulated",
    times=LivenessTimes(ping_ms=100, suspect_ms=400, dead_after_ms=1_000, lease_ms=2_000),
    stall_ms=2_000,
    drain_ms=3_000,
    job_timeout_ms=20_000,
    ready_ms=30_000,
    rest_ms=(300, 3_500),
    token_ids=(97, 122),
    prompt_tokens=(1, 300),
    output_tokens=(1, 60),
    questions=16,
    clients=4,
    warm_up_ms=3_000,
    growth_mib=16,
    node_flags=("--max-tokens", "512", "--chunk-tokens", "32"),
    speed_flags=("--emulated-prefill-tokens-per-s", "4000", "--emulated-decode-ms", "2"),
)

TORCH = Scenario(
    kind="torch",
    times=LivenessTimes(ping_ms=500, suspect_ms=1_500, dead_after_ms=3_000, lease_ms=5_000),
    stall_ms=120_000,
    drain_ms=30_000,
    job_timeout_ms=120_000,
    ready_ms=300_000,
    rest_ms=(1_000, 6_000),
    token_ids=(1_000, 40_000),
    prompt_tokens=(1, 96),
    output_tokens=(1, 12),
    questions=6,
    clients=3,
    warm_up_ms=15_000,
    growth_mib=96,
    node_flags=("--max-tokens", "256", "--chunk-tokens", "32"),
)

SCENARIOS = {scenario.kind: scenario for scenario in (EMULATED, TORCH)}
