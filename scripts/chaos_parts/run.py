"""One chaos run: start, disturb, heal, look, stop.

Decides the order of the phases and holds everything that must be gone at the end. All rows of disturbances of
nodes and client processes are generators that the main thread turns, because the kernel ends a child with the
thread that started it; the relay, the strangers, the load and the watch have threads of their own. Whatever
happens, `close` leaves no process, socket or shared memory behind.
"""

import shutil
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path

from chaos_parts.audit import Evidence
from chaos_parts.jobs import Question, answer_alone, draw_questions
from chaos_parts.load import LoadClient
from chaos_parts.logs import bad_lines
from chaos_parts.nodes import ChaosNode, Waits
from chaos_parts.relay import Relay
from chaos_parts.scenario import Scenario
from chaos_parts.schedule import RESTARTS, client_acts, node_acts, random_of, stranger_acts, wire_acts
from chaos_parts.short_clients import ShortClient
from chaos_parts.strangers import Strangers
from chaos_parts.watch import Watch, is_quiet, orphan_bound_ms
from common.clock import now_ms, pause_ms
from common.errors import NodeUnavailable
from transport.client import Client
from transport.launch.pair_plan import split_cpus
from transport.launch.run_directory import RunDirectory
from transport.slab import remove_stale_slabs

MAX_QUEUE = 8
POLICIES = ("fail", "retry")
# Restarts happen in this part of the run; then every process is old enough to show whether it grows.
RESTARTING_SHARE = 0.6
_TURN_MS = 5
_REST_MS = 50
_CLIENT_PAUSE_MS = 300
_BACKOFF_CAP_MS = 1_000


class ChaosRun:
    """One run. `phase` and `counts` are for who shows its progress; `tick` is called all the time."""

    def __init__(
        self, scenario: Scenario, seed: int, seconds: int, tick: Callable[["ChaosRun"], None]
    ) -> None:
        self.scenario = scenario
        self.seed = seed
        self.phase = "starting"
        self.started_ms: int | None = None
        self.load: list[LoadClient] = []
        self.nodes: list[ChaosNode] = []
        self.seconds = seconds
        self._tick = tick
        self._counts: Counter[str] = Counter()
        self._ending = False
        self._short: list[ShortClient] = []
        self._relay: Relay | None = None
        self._strangers: Strangers | None = None
        self._watch: Watch | None = None
        self._directory = RunDirectory()

    @property
    def directory(self) -> Path:
        """Where the logs are until `close`."""
        return self._directory.path

    @property
    def counts(self) -> dict[str, int]:
        """Disturbances so far, by kind."""
        counts = Counter(self._counts)
        for thread, where in ((self._relay, "wire"), (self._strangers, "stranger")):
            if thread is not None:
                counts.update({f"{where}: {kind}": number for kind, number in thread.counts.items()})
        return dict(sorted(counts.items()))

    def execute(self) -> Evidence:
        """All phases. Raises TandemError when the nodes do not even start."""
        scenario = self.scenario
        self.phase = "computing the reference"
        questions = answer_alone(draw_questions(self.seed, scenario), scenario, lambda: self._tick(self))
        self.phase = "starting both nodes"
        self._start(questions)
        self.phase = "disturbing"
        self.started_ms = now_ms()
        self._disturb(questions)
        self.phase = "healing"
        quiet_ms = self._heal()
        self.phase = "stopping"
        self._stop()
        return self._evidence(questions, quiet_ms)

    def _start(self, questions: list[Question]) -> None:
        scenario, seed = self.scenario, self.seed
        doors = [self._directory.endpoint(name) for name in ("decode", "prefill")]
        self._relay = Relay(doors[1].removeprefix("ipc://"))
        self._relay.start()
        decode = ChaosNode("decode_node", doors[0], self.directory, self._decode_flags)
        prefill = ChaosNode("prefill_node", doors[1], self.directory, self._prefill_flags)
        self.nodes = [decode, prefill]
        for node in self.nodes:
            node.start()
        self._turn_until_done([node.wait_ready(scenario.ready_ms) for node in self.nodes])
        if not all(node.ready for node in self.nodes):
            raise NodeUnavailable(f"the nodes did not start; logs: {self.directory}")
        self._watch = Watch(self.nodes, scenario)
        self._watch.start()
        self._strangers = Strangers(stranger_acts(seed), (doors[0], doors[1]))
        self._strangers.start()
        for index in range(scenario.clients):
            client = LoadClient(f"load-{index}", doors[0], questions, scenario, seed)
            self.load.append(client)
            client.start()

    def _common_flags(self) -> list[str]:
        scenario = self.scenario
        flags = [*scenario.node_flags, *scenario.speed_flags, *scenario.liveness_flags()]
        return [*flags, "--backend", scenario.kind, "--story-dir", str(self.directory)]

    def _prefill_flags(self, life: int) -> list[str]:
        prefill_cpus, _ = split_cpus()
        return [*self._common_flags(), *_pinned(prefill_cpus), "--source-slots", "2"]

    def _decode_flags(self, life: int) -> list[str]:
        """Every life has its own policy, which follows from the seed like everything else."""
        _, decode_cpus = split_cpus()
        flags = [*self._common_flags(), *_pinned(decode_cpus), "--pd-prefill-worker", self._relay.endpoint]
        flags += ["--pd-remote-only", "--pd-prefetch-next", "--max-queue", str(MAX_QUEUE)]
        policy = random_of(self.seed, f"policy {life}").choice(POLICIES)
        flags += ["--on-prefill-failure", policy]
        return [*flags, "--job-timeout-ms", str(self.scenario.job_timeout_ms)]

    def _disturb(self, questions: list[Question]) -> None:
        rows = [self._node_row(node) for node in self.nodes]
        rows += [self._wire_row(), self._client_row(questions)]
        deadline_ms = self.started_ms + 1_000 * self.seconds

        def until_deadline() -> Waits:
            while now_ms() < deadline_ms:
                yield _REST_MS
            self._ending = True

        self._turn_until_done([*rows, until_deadline()])

    def _turn_until_done(self, works: list[Waits]) -> None:
        """Turn the generators, each when it is due, until all of them have ended."""
        due_ms = dict.fromkeys(works, 0)
        while due_ms:
            for work, at_ms in list(due_ms.items()):
                if now_ms() < at_ms:
                    continue
                wait_ms = next(work, None)
                if wait_ms is None:
                    del due_ms[work]
                else:
                    due_ms[work] = now_ms() + wait_ms
            self._tick(self)
            pause_ms(_TURN_MS)

    def _rest(self, rest_ms: int) -> Waits:
        until_ms = now_ms() + rest_ms
        while now_ms() < until_ms and not self._ending:
            yield _REST_MS

    def _node_row(self, node: ChaosNode) -> Waits:
        scenario = self.scenario
        restarts_until_ms = self.started_ms + round(1_000 * self.seconds * RESTARTING_SHARE)
        for act in node_acts(self.seed, node.name, scenario):
            yield from self._rest(act.rest_ms)
            if self._ending:
                return
            if not node.look():
                node.start()
                yield from node.wait_ready(scenario.ready_ms)
            if act.kind in RESTARTS and now_ms() > restarts_until_ms:
                continue
            self._counts[f"{node.name}: {act.kind}"] += 1
            yield from node.disturb(act, scenario.drain_ms)
            yield from node.wait_ready(scenario.ready_ms)

    def _wire_row(self) -> Waits:
        for act in wire_acts(self.seed, self.scenario):
            yield from self._rest(act.rest_ms)
            if self._ending:
                return
            self._relay.arm(act)

    def _client_row(self, questions: list[Question]) -> Waits:
        acts = client_acts(self.seed, self.scenario)
        for number, act in zip(count(), acts, strict=False):
            yield from self._rest(act.rest_ms)
            if self._ending:
                return
            name, door = f"short-{number}", self.nodes[0].endpoint
            client = ShortClient(name, door, questions, self.scenario, act, self.directory)
            self._short.append(client)
            self._counts[f"client: {act.kind}"] += 1
            yield from client.live()

    def _heal(self) -> int | None:
        """Leave everything alone until nothing is held; how long that took, None if it never came."""
        self._relay.disarm()
        self._strangers.leave()
        for node in self.nodes:
            if not node.look():
                node.start()
        self._turn_until_done([node.wait_ready(self.scenario.ready_ms) for node in self.nodes])
        for client in self.load:
            client.calm()
        self._wait(lambda: not any(client.open_count for client in self.load), self._jobs_bound_ms)
        healed_ms = now_ms()
        quiet = self._wait(self._quiet, self.quiet_bound_ms)
        quiet_ms = now_ms() - healed_ms
        self.phase = "sending the last jobs"
        for client in self.load:
            client.healed()
        self._wait(lambda: not any(client.is_alive() for client in self.load), self._jobs_bound_ms)
        quiet = quiet and self._wait(self._quiet, self.quiet_bound_ms)
        return quiet_ms if quiet else None

    @property
    def quiet_bound_ms(self) -> int:
        """From the last fault and job to nothing held: invariant 7 with `stall_ms` for the longest chunk, as
        in the bound of an orphan (docs/protocol.md), and a second for a busy machine."""
        times = self.scenario.times
        idle_ms = times.lease_ms + 2 * times.dead_after_ms + _BACKOFF_CAP_MS
        return idle_ms + self.scenario.stall_ms + 1_000

    @property
    def _jobs_bound_ms(self) -> int:
        return self.scenario.job_timeout_ms + self.quiet_bound_ms

    def _wait(self, condition: Callable[[], bool], timeout_ms: int) -> bool:
        deadline_ms = now_ms() + timeout_ms
        while not condition():
            if now_ms() > deadline_ms:
                return False
            self._tick(self)
            pause_ms(_REST_MS)
        return True

    def _quiet(self) -> bool:
        try:
            for node in self.nodes:
                with Client(node.endpoint, self.scenario.times.lease_ms) as client:
                    if not is_quiet(client.status()):
                        return False
        except NodeUnavailable:
            return False
        return True

    def _stop(self) -> None:
        for client in self.load:
            client.leave()
            client.join()
        self._watch.leave()
        for node in self.nodes:  # the decode node first
            self._turn_until_done([node.drain(self.scenario.drain_ms)])
        self._relay.leave()

    def _evidence(self, questions: list[Question], quiet_ms: int | None) -> Evidence:
        lives = [life for node in self.nodes for life in node.lives]
        short_jobs = [job for client in self._short for job in client.jobs()]
        threads = [self._relay, self._strangers, self._watch, *self.load]
        faults = [f"{thread.name}: {thread.fault}" for thread in threads if thread.fault]
        return Evidence(
            scenario=self.scenario,
            questions=questions,
            jobs=[job for client in self.load for job in client.jobs] + short_jobs,
            last_jobs=[job for client in self.load for job in client.last_jobs],
            lives=lives,
            seen=self._watch.seen,
            orphan_bound_ms=orphan_bound_ms(self.scenario),
            quiet_ms=quiet_ms,
            quiet_bound_ms=self.quiet_bound_ms,
            bad_lines=[text for life in lives for text in bad_lines(life)],
            remains=self._remains(),
            faults=faults + [client.fault for client in self._short if client.fault],
            late_ms={client.name: client.late_ms for client in self.load},
        )

    def _remains(self) -> list[str]:
        """What nobody should find now: children of this process, sockets, shared memory of our nodes."""
        left = [str(path) for path in self.directory.glob("*.sock*")]
        left += [
            slab for node in self.nodes for life in node.lives for slab in life.slabs if Path(slab).exists()
        ]
        children = Path("/proc/self/task")
        for path in children.glob("*/children"):
            left += [f"process {pid}" for pid in path.read_text(encoding="utf-8").split()]
        return left

    def close(self, keep_logs: bool) -> None:
        """End and remove whatever is left."""
        for thread in (*self.load, self._strangers, self._watch, self._relay):
            if thread is not None:
                thread.leave()
        for node in self.nodes:
            node.kill()
        for client in self._short:
            client.kill()
        for client in self.load:
            if client.is_alive():
                client.join(_CLIENT_PAUSE_MS / 1_000)
        remove_stale_slabs()
        self._directory.close()
        if not keep_logs:
            shutil.rmtree(self.directory)


def _pinned(cpus: tuple[int, ...]) -> list[str]:
    return ["--cpus", ",".join(map(str, cpus))] if cpus else []
