"""Start and stop a decode node, its prefill nodes and its gateway on this machine.

Decides what counts as ready, and the order of stopping: the gateway first, then the decode node, so that its
work still finds a prefill node. Used by the scripts and their tests. It must never restart a daemon: one that
ends by itself is an error with its log, and the others are stopped.
"""

import signal
from collections.abc import Callable
from typing import Any, Self

from common.clock import now_ms, pause_ms
from common.errors import ConfigError, ExitStatus, NodeUnavailable, TandemError
from transport.client import Client
from transport.launch.daemon_process import DaemonProcess
from transport.launch.pair_plan import PairPlan, split_cpus
from transport.launch.run_directory import RunDirectory, RunningPair, remove_socket

READY_MS = 300_000
STOP_MS = 45_000
_TURN_MS = 20
_ASK_MS = 300
_LAST_LINES = 8


class DaemonEnded(TandemError):
    """A daemon ended that should be running; the message holds its exit status and its last log lines."""


class Pair:
    """Both daemons of a plan. Leaving the context stops them; an interruption of that kills them."""

    def __init__(self, plan: PairPlan, daemon_class: type[DaemonProcess] = DaemonProcess) -> None:
        """Start the processes; they are not ready yet. Raises ConfigError when there is no place for them."""
        self.plan = plan
        self._daemon_class = daemon_class
        self._keys = plan.client_keys()
        self.directory = RunDirectory()
        self.prefill_cpus, self.decode_cpus = split_cpus()
        self.prefills: list[DaemonProcess] = []
        self.gateway: DaemonProcess | None = None
        try:
            workers = () if plan.alone else self._start_prefills()
            endpoint = plan.decode_endpoint or self.directory.endpoint("decode")
            flags = plan.decode_flags(endpoint, workers, self.decode_cpus)
            self.decode = daemon_class("decode_node", flags, self.directory.path, "")
        except BaseException:
            for prefill in self.prefills:
                prefill.kill()
            self.directory.close()
            raise

    def _start_prefills(self) -> tuple[str, ...]:
        suffixes = ["", *map(str, range(2, self.plan.prefill_nodes + 1))]
        endpoints = [self.directory.endpoint(f"prefill{suffix}") for suffix in suffixes]
        endpoints[0] = self.plan.prefill_endpoint or endpoints[0]
        for suffix, endpoint in zip(suffixes, endpoints, strict=True):
            flags = self.plan.prefill_flags(endpoint, self.prefill_cpus)
            self.prefills.append(self._daemon_class("prefill_node", flags, self.directory.path, suffix))
        return tuple(endpoints)

    @property
    def prefill(self) -> DaemonProcess | None:
        """The first prefill node, if there is one."""
        return self.prefills[0] if self.prefills else None

    @property
    def daemons(self) -> list[DaemonProcess]:
        """In the order of stopping."""
        gateway = [] if self.gateway is None else [self.gateway]
        return [*gateway, self.decode, *self.prefills]

    @property
    def decode_endpoint(self) -> str:
        """Where clients connect, once ready."""
        return self.decode.endpoint or ""

    def wait_ready(self, turn: Callable[[], None] = lambda: None, timeout_ms: int = READY_MS) -> None:
        """Wait until jobs are accepted. `turn` is called again and again; what it raises ends the waiting.

        Raises DaemonEnded, or NodeUnavailable when the time is over.
        """
        deadline_ms = now_ms() + timeout_ms
        while not all(daemon.ready() for daemon in self.daemons):
            self._turn(turn, deadline_ms)
        while not self._accepts():
            self._turn(turn, deadline_ms)
        if self.plan.gateway is None:
            return
        flags = self.plan.gateway_flags(self.decode_endpoint)
        self.gateway = self._daemon_class("decode_node.gateway", flags, self.directory.path, "")
        while not self.gateway.ready():
            self._turn(turn, deadline_ms)

    def _accepts(self) -> bool:
        """Whether the decode node takes jobs; asked in short, so that the end of a node shows at once.

        Raises NodeUnavailable when no prefill node will ever have it; other refusals may pass.
        """
        try:
            with Client(self.decode_endpoint, connect_timeout_ms=_ASK_MS, keys=self._keys) as client:
                status = client.status(timeout_ms=_ASK_MS)
        except NodeUnavailable:
            return False
        refusals = [worker["refusal"] for worker in status["workers"] if worker["misfit"]]
        if refusals and not status["accepting"]:
            raise NodeUnavailable(f"the nodes do not fit together: {refusals[0]}")
        return status["accepting"]

    def _turn(self, turn: Callable[[], None], deadline_ms: int) -> None:
        self.check()
        turn()
        if now_ms() > deadline_ms:
            raise NodeUnavailable(f"the nodes are not ready in time; their logs are in {self.directory.path}")
        pause_ms(_TURN_MS)

    def check(self) -> None:
        """Raise DaemonEnded if one of them is no longer running, ConfigError if it refused its flags."""
        for daemon in self.daemons:
            if daemon.status == ExitStatus.CONFIG:
                complaint = daemon.complaint() or "see its log"
                raise ConfigError(f"{daemon.ending()}: {complaint}\n  (log: {daemon.log_path})")
            if daemon.status == ExitStatus.REFUSED and (reason := daemon.last_reason()):
                raise DaemonEnded(f"{daemon.ending()}: {reason}\n  (log: {daemon.log_path})")
            if daemon.status is not None:
                lines = "\n".join(f"  {line}" for line in daemon.last_lines(_LAST_LINES))
                raise DaemonEnded(f"{daemon.ending()}; its last words:\n{lines}\n  (log: {daemon.log_path})")

    def announce(self) -> None:
        """Let `running_pairs` find this pair."""
        prefill_endpoint = "" if self.prefill is None else self.prefill.endpoint or ""
        self.directory.announce(RunningPair(self.decode_endpoint, prefill_endpoint, self.plan.model or ""))

    def status(self) -> dict[str, Any]:
        """STATUS of the decode node."""
        with Client(self.decode_endpoint, keys=self._keys) as client:
            return client.status()

    def stop(self, turn: Callable[[], None] = lambda: None, timeout_ms: int | None = STOP_MS) -> bool:
        """Drain and end both, decode first; whether each that still ran ended well.

        timeout_ms: for each, after which it is killed; None waits for ever. What `turn` raises comes through
        when both are killed.
        """
        well = True
        try:
            for daemon in self.daemons:
                if daemon.status is not None:
                    continue
                daemon.request_stop()
                deadline_ms = None if timeout_ms is None else now_ms() + timeout_ms
                while not daemon.wait(_TURN_MS) and (deadline_ms is None or now_ms() < deadline_ms):
                    turn()
                # One that was not ready yet may have had no handler for our signal, and nothing to drain.
                too_early = daemon.endpoint is None and daemon.status == -signal.SIGTERM
                well = well and (daemon.status == 0 or too_early)
        finally:
            self.kill()
        return well

    def kill(self) -> None:
        """End at once what still runs, and remove what killed daemons leave behind."""
        for daemon in self.daemons:
            daemon.kill()
        if any(daemon.status != 0 for daemon in self.daemons):
            from transport.slab import remove_stale_slabs  # numpy would make every start wait

            remove_stale_slabs()
        for endpoint in (self.plan.decode_endpoint, self.plan.prefill_endpoint):
            if endpoint is not None:
                remove_socket(endpoint)
        self.directory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
