"""What a pair consists of, and the flags that its daemons are started with.

Decides the flags of every daemon from what a person asked for, what a file says and what is usual, and how
the daemons share the CPUs. Used by `transport/launch/pair.py` and whoever plans one. It must never start a
process.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from common.config import NodeConfig, flag_of
from common.config_file import ConfigFile, FileValue
from common.cpus import available_cpus
from common.decode_config import DecodeConfig
from common.errors import ConfigError
from common.prefill_config import PrefillConfig
from transport.key_files import PUBLIC_SUFFIX, ClientKeys, connecting_keys

BACKENDS = {"torch": ("torch", "torch"), "emulated": ("emulated", "emulated"), "npu": ("rngd", "atom")}
"""Kinds of pair: the backend of the prefill node, the backend of the decode node."""

EMULATED_MAX_TOKENS = 2_048
"""For tokens of one byte each: the engine's own 1,024 are less than the demonstration's prompts."""

AUTOMATIC_DEPTH_SLOTS = 4
"""Source slots where the depth of prefetch is found out: it cannot be greater."""


@dataclass(frozen=True, slots=True)
class PairPlan:
    """What to start.

    kind: a key of `BACKENDS`. None, here and for model, max_tokens and prefetch_depth, takes what the
    configuration file says, else what is usual. prefetch_depth: 0 is off. Endpoints: None takes one in the
    pair's own directory. The extra flags come last and so have the last word. alone: no prefill node; the
    decode node computes prompts itself. file: set by `with_file`. key_file: one secret key for both nodes and
    their launcher, with its public key beside it. allowed_keys: who else may connect to the decode node.
    lanes: None as for kind. prefill_nodes: so many on this machine. gateway: flags of one, None for none.
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
    lanes: int | None = None
    prefill_nodes: int = 1
    gateway: tuple[str, ...] | None = None

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

    def decode_flags(self, endpoint: str, workers: tuple[str, ...], cpus: tuple[int, ...]) -> list[str]:
        asked: dict[str, Any] = {"bind": endpoint, "allowed_keys": self.allowed_keys or self.public_key}
        asked["slots"] = self.lanes
        usual = self._usual(1, cpus)
        if workers:
            asked["server_key"] = self.public_key
            asked["pd_prefill_worker"] = ",".join(workers)
            usual |= {"pd_remote_only": True, "pd_prefetch_next": self.depth or None}
            if self.prefetch_depth is not None:
                asked["pd_prefetch_next"] = self.prefetch_depth or "off"
        return [*self._flags(DecodeConfig, asked, usual), *self.decode_extra]

    def gateway_flags(self, decode_endpoint: str) -> list[str]:
        """Flags of the gateway, which has the pair's keys."""
        keys = []
        if self.key_file is not None:
            keys = ["--key-file", self.key_file, "--server-key", str(self.public_key)]
        return ["--decode", decode_endpoint, *keys, *(self.gateway or ())]

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
