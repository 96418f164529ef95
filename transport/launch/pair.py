"""Start and stop a decode node and its prefill node on this machine.

Decides the flags of both daemons, how they share the CPUs, what counts as ready, and the order of stopping:
decode first, so that its work still finds a prefill node. Used by the scripts and their tests. It must never
restart a daemon: one that ends by itself is an error with its log, and the other is stopped.
"""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

from common.clock import now_ms, pause_ms
from common.config import NodeConfig, flag_of
from common.config_file import ConfigFile, FileValue
from common.cpus import available_cpus
from common.decode_config import DecodeConfig
from common.errors import ConfigError, ExitStatus, NodeUnavailable, TandemError
from common.prefill_config import PrefillConfig
from transport.client import Client
from transport.key_files import PUBLIC_SUFFIX, ClientKeys, connecting_keys
from transport.launch.daemon_process import DaemonProcess
from transport.launch.run_directory import RunDirectory, RunningPair, remove_socket

BACKENDS = {"torch": ("torch", "torch"), "emulated": ("emulated", "emulated"), "npu": ("rngd", "atom")}
"""Kinds of pair: the backend of the prefill node, the backend of the decode node."""

EMULATED_MAX_TOKENS = 2_048
"""For tokens of one byte each: the engine's own 1,024 are less than the demonstration's prompts."""

AUTOMATIC_DEPTH_SLOTS = 4
"""Source slots where the depth of prefetch is found out: it cannot be greater."""

READY_MS = 300_000
STOP_MS = 45_000
_TURN_MS = 20
_ASK_MS = 300
_LAST_LINES = 8


class DaemonEnded(TandemError):
    """A daemon ended that should be running; the message holds its exit status and its last log lines."""


@dataclass(frozen=True, slots=True)
class PairPlan:
    """What to start.

    kind: a key of `BACKENDS`. None, here and for model, max_tokens and prefetch_depth, takes what the
    configuration file says, else what is usual. prefetch_depth: 0 is off. Endpoints: None takes one in the
    pair's own directory. The extra flags come last and so have the last word. alone: no prefill node; the
    decode node computes prompts itself. file: set by `with_file`. key_file: one secret key for both nodes and
    their launcher, with its public key beside it. allowed_keys: who else may connect to the decode node.
    """

    kind: str | None = None
    model: str | None = None
    max_tokens: int | None = None
    prefetch_depth: int | None = None
    decode_endpoint: str | None = None
    prefill_endpoint: str | None = None
    prefill_extra: tuple[str, ...] = ()
    decode_extra: tuple[str, ...] = ()
    alone: bool = False
    file: ConfigFile | None = None
    key_file: str | None = None
    allowed_keys: str | None = None

    @property
    def public_key(self) -> str | None:
        """Path of the public half of `key_file`."""
        return None if self.key_file is None else str(Path(self.key_file).with_suffix(PUBLIC_SUFFIX))

    def client_keys(self) -> ClientKeys | None:
        """The launcher's keys, which are the nodes' own. Raises ConfigError."""
        return connecting_keys(self.key_file, self.public_key)

    def with_file(self, file: ConfigFile) -> "PairPlan":
        """This plan, with a file for what it leaves open.

        Raises ConfigError when the file's decode node would look for another prefill node than the pair's, or
        when its nodes have different keys.
        """
        worker = file.decode.get("pd_prefill_worker")
        prefill_endpoint = self.prefill_endpoint or _value(file.prefill, "bind")
        if worker is not None:
            prefill_endpoint = prefill_endpoint or PrefillConfig.model_fields["bind"].default
            if worker.value not in (prefill_endpoint, (prefill_endpoint,)):
                raise ConfigError(
                    f"{file.path}: {worker.place} is {worker.value}, but the prefill node of this pair is at "
                    f"{prefill_endpoint}: make both equal, or leave both out"
                )
        key_file = self.key_file or _value(file.decode, "key_file")
        if self.key_file is None and key_file != _value(file.prefill, "key_file"):
            raise ConfigError(
                f"{file.path}: key-file: a pair that is started together has one key: put it above the tables"
            )
        return replace(
            self,
            decode_endpoint=self.decode_endpoint or _value(file.decode, "bind"),
            prefill_endpoint=prefill_endpoint,
            key_file=key_file,
            allowed_keys=self.allowed_keys or _value(file.decode, "allowed_keys"),
            file=file,
        )

    @property
    def depth(self) -> int | str:
        """The depth of prefetch that the decode node is started with; "auto" if it is to find one."""
        if self.prefetch_depth is not None:
            return self.prefetch_depth
        said = self._said(DecodeConfig)
        if "pd_prefetch_next" in said:
            value = said["pd_prefetch_next"].value
            return value if value == "auto" else int(value or 0)
        remote_only = said.get("pd_remote_only")
        return 1 if remote_only is None or remote_only.value else 0

    def prefill_flags(self, endpoint: str, cpus: tuple[int, ...]) -> list[str]:
        slots = AUTOMATIC_DEPTH_SLOTS if self.depth == "auto" else max(1, self.depth)
        usual = self._usual(0, cpus) | {"source_slots": slots}
        asked = {"bind": endpoint, "allowed_keys": self.public_key}
        return [*self._flags(PrefillConfig, asked, usual), *self.prefill_extra]

    def decode_flags(self, endpoint: str, worker: str | None, cpus: tuple[int, ...]) -> list[str]:
        asked: dict[str, Any] = {"bind": endpoint, "allowed_keys": self.allowed_keys or self.public_key}
        usual = self._usual(1, cpus)
        if worker is not None:
            asked["server_key"] = self.public_key
            asked["pd_prefill_worker"] = worker
            usual |= {"pd_remote_only": True, "pd_prefetch_next": self.depth or None}
            if self.prefetch_depth is not None:
                asked["pd_prefetch_next"] = self.prefetch_depth or "off"
        return [*self._flags(DecodeConfig, asked, usual), *self.decode_extra]

    def _said(self, config_class: type[NodeConfig]) -> Mapping[str, FileValue]:
        return {} if self.file is None else self.file.of(config_class)

    def _usual(self, node: int, cpus: tuple[int, ...]) -> dict[str, Any]:
        """What is usual for a node (0 prefill, 1 decode) where nobody says anything; None for no flag."""
        return {
            "backend": BACKENDS["torch"][node],
            "cpus": ",".join(map(str, cpus)) or None,
            "max_tokens": EMULATED_MAX_TOKENS if self.kind == "emulated" else None,
        }

    def _flags(
        self, config_class: type[NodeConfig], asked: dict[str, Any], usual: dict[str, Any]
    ) -> list[str]:
        """Flags for what was asked for, and for what is usual unless the file says otherwise."""
        asked |= {"model": self.model, "max_tokens": self.max_tokens, "key_file": self.key_file}
        if self.kind is not None:
            asked["backend"] = BACKENDS[self.kind][0 if config_class is PrefillConfig else 1]
        said = self._said(config_class)
        options = {name: value for name, value in usual.items() if name not in said}
        options |= {name: value for name, value in asked.items() if value is not None}
        flags = [] if self.file is None else ["--config", self.file.path]
        for name, value in options.items():
            if value is not None:
                flags += [flag_of(name)] if value is True else [flag_of(name), str(value)]
        return flags


def _value(said: Mapping[str, FileValue], name: str) -> Any:
    return said[name].value if name in said else None


def split_cpus() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """CPUs for the prefill node and for the decode node, none in common; both empty if there is one only.

    Hardware threads of one core stay together, and an odd core goes to prefill, which is bound by arithmetic.
    """
    cores: dict[str, list[int]] = {}
    for cpu in sorted(available_cpus()):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings.read_text() if siblings.exists() else str(cpu), []).append(cpu)
    groups = list(cores.values())
    if len(groups) == 1:
        groups = [[cpu] for cpu in groups[0]]
    if len(groups) == 1:
        return (), ()
    middle = (len(groups) + 1) // 2
    first, second = (sorted(chain(*half)) for half in (groups[:middle], groups[middle:]))
    return tuple(first), tuple(second)


class Pair:
    """Both daemons of a plan. Leaving the context stops them; an interruption of that kills them."""

    def __init__(self, plan: PairPlan, daemon_class: type[DaemonProcess] = DaemonProcess) -> None:
        """Start the processes; they are not ready yet. Raises ConfigError when there is no place for them."""
        self.plan = plan
        self._daemon_class = daemon_class
        self._keys = plan.client_keys()
        self.directory = RunDirectory()
        self.prefill_cpus, self.decode_cpus = split_cpus()
        self.prefill: DaemonProcess | None = None
        try:
            worker = self._start_prefill() if not plan.alone else None
            endpoint = plan.decode_endpoint or self.directory.endpoint("decode")
            flags = plan.decode_flags(endpoint, worker, self.decode_cpus)
            self.decode = daemon_class("decode_node", flags, self.directory.path)
        except BaseException:
            if self.prefill is not None:
                self.prefill.kill()
            self.directory.close()
            raise

    def _start_prefill(self) -> str:
        endpoint = self.plan.prefill_endpoint or self.directory.endpoint("prefill")
        flags = self.plan.prefill_flags(endpoint, self.prefill_cpus)
        self.prefill = self._daemon_class("prefill_node", flags, self.directory.path)
        return endpoint

    @property
    def daemons(self) -> list[DaemonProcess]:
        """In the order of stopping."""
        return [self.decode] if self.prefill is None else [self.decode, self.prefill]

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
