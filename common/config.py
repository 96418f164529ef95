"""The configuration of both daemons: every option, its default, its range, and what goes with what.

Decides which configurations exist. `common/command_line.py` builds the flags and environment variables from
these fields, so a default is written here and nowhere else; precedence is command line, environment, file,
default. A model is frozen, and its constructor raises `ConfigError`, with what was wrong and what would be
right, before anything heavy is imported or a model file is looked at. It must never read the environment or
a file itself: whoever constructs one sees every value that goes in.

Plain pydantic models rather than pydantic-settings: importing the latter adds 0.2 s to every start and every
`--help`, and the part of it that is used here, one environment variable per field, is ten lines. For the same
reason a model is built when it is first constructed, not when it is imported.
"""

import os.path
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from common.cpus import check_cpus, parse_cpus, thread_count
from common.endpoints import check_bind_endpoint, check_bind_form, check_connect_endpoint
from common.engines.registry import NAMED_MODEL, EngineSettings
from common.errors import ConfigError

DURATION_MS_MAX = 24 * 3_600_000
TOKENS_MAX = 2**20
CACHE_MB_MAX = 2**22


@dataclass(frozen=True, slots=True)
class Flag:
    """How a field looks on the command line.

    metavar: the name of its value. bare: its value when the flag stands alone, None if it cannot. unset: what
    applies when the field is None.
    """

    metavar: str
    bare: str | None = None
    unset: str = "none"


def _existing_directory(path: str) -> str:
    if not os.path.isdir(path):
        raise ValueError(f"{path!r} is not a directory; create it first")
    return path


Milliseconds = Annotated[int, Field(ge=1, le=DURATION_MS_MAX)]
Tokens = Annotated[int, Field(ge=1, le=TOKENS_MAX)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]
BindEndpoint = Annotated[str, AfterValidator(check_bind_form), Flag("ENDPOINT")]
ConnectEndpoint = Annotated[str, AfterValidator(check_connect_endpoint)]
Directory = Annotated[str, AfterValidator(_existing_directory)]
Cpus = Annotated[
    tuple[int, ...],
    BeforeValidator(lambda value: parse_cpus(value) if isinstance(value, str) else value),
    AfterValidator(check_cpus),
]


class NodeConfig(BaseModel):
    """What both daemons have in common. Construction raises `ConfigError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
    program: ClassVar[str]
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    config: Annotated[Name | None, Flag("FILE")] = Field(
        None, description="TOML file with further options, of this node or of both"
    )
    model: Annotated[Name, Flag("MODEL")] = Field(
        NAMED_MODEL, description="name or path of the model to serve"
    )
    bind: BindEndpoint
    backend: str
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="number format of weights and KV"
    )
    max_tokens: Annotated[Tokens | None, Flag("TOKENS", unset="the backend's")] = Field(
        None, description="most tokens, prompt and answer together, that a slot or lane holds"
    )
    chunk_tokens: Annotated[Tokens | None, Flag("TOKENS", unset="the backend's")] = Field(
        None, description="prompt tokens computed at a time; a cancel takes effect between chunks"
    )
    cpus: Annotated[Cpus | None, Flag("LIST", unset="not pinned")] = Field(
        None, description="CPUs to run on, as in 0,2-3; one compute thread for each"
    )
    kv_plane: Literal["auto", "shm", "tcp"] = Field(
        "auto",
        description="how KV gets from node to node: shared memory, a TCP connection of its own, or auto for "
        "shared memory if the nodes prove to share it",
    )
    prefix_cache_mb: Annotated[int, Field(ge=0, le=CACHE_MB_MAX), Flag("MB")] = Field(
        0, description="memory for KV of earlier prompts and answers, in MiB, beyond the slots; 0 keeps none"
    )
    prefix_block_tokens: Annotated[int, Field(ge=1, le=4_096), Flag("TOKENS")] = Field(
        16, description="tokens in one block of the prefix cache; only whole blocks are found again"
    )
    drain_ms: Annotated[Milliseconds, Flag("MS")] = Field(
        30_000, description="time for running work to end after the first signal, in ms"
    )
    ping_ms: Annotated[Milliseconds, Flag("MS")] = Field(500, description="interval of signs of life, in ms")
    suspect_ms: Annotated[Milliseconds, Flag("MS")] = Field(
        1_500, description="silence after which the other node gets no new work, in ms"
    )
    dead_after_ms: Annotated[Milliseconds, Flag("MS")] = Field(
        3_000, description="silence after which the other node counts as dead, in ms"
    )
    lease_ms: Annotated[Milliseconds, Flag("MS")] = Field(
        5_000, description="silence after which a session ends, in ms"
    )
    stall_ms: Annotated[Milliseconds | None, Flag("MS", unset="from the engine's longest chunk")] = Field(
        None, description="time without progress of the compute thread after which it counts as hung, in ms"
    )
    key_file: Annotated[Name | None, Flag("FILE")] = Field(
        None, description="this node's secret key, made by scripts/keys.py; every connection is encrypted"
    )
    allowed_keys: Annotated[Name | None, Flag("PATH")] = Field(
        None, description="public keys of who may connect: a file, or a directory of .pub files"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level logged")
    log_form: Literal["auto", "json", "text"] = Field(
        "auto", description="form of the log on stderr; auto is text on a terminal, else JSON lines"
    )
    emulated_seed: Annotated[int, Field(ge=0, lt=2**63), Flag("N")] = Field(
        0, description="emulated backends: the model's weights, as it were; equal on both nodes"
    )
    emulated_prefill_tokens_per_s: Annotated[Rate | None, Flag("RATE", unset="the backend's")] = Field(
        None, description="emulated backends: prefill speed in tokens per second"
    )
    emulated_decode_ms: Annotated[Rate | None, Flag("MS", unset="the backend's")] = Field(
        None, description="emulated backends: duration of a decode step, in ms"
    )
    emulated_rope_form: Literal["half", "interleaved"] = Field(
        "half", description="emulated backends: order of bytes in K, as if positions were rotated that way"
    )
    emulated_heads_reversed: bool = Field(
        False, description="emulated backends: write the KV heads in reverse order"
    )
    story_dir: Annotated[Directory | None, Flag("DIR", unset="where pairs run")] = Field(
        None, description="directory for the last steps of a node that finds itself at fault (exit status 4)"
    )
    hold_dir: Annotated[Directory | None, Flag("DIR")] = Field(
        None, description="for tests: directory whose files hold or fail this node at named points"
    )

    def __init__(self, *, origins: Mapping[str, str] | None = None, **values: Any) -> None:
        """origins: where values come from that are not flags, by field, for people."""
        origins = origins or {}
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_readable(error, origins)) from None
        self._origins = {name: origins.get(name, "flag") for name in values}

    @property
    def origins(self) -> dict[str, str]:
        """Where each value comes from that is not its default: "flag", or as the constructor was told."""
        fields = type(self).model_fields
        return {
            name: origin
            for name, origin in self._origins.items()
            if getattr(self, name) != fields[name].default
        }

    @model_validator(mode="after")
    def _check_liveness(self) -> Self:
        bounds = [self.ping_ms, self.suspect_ms, self.dead_after_ms, self.lease_ms]
        if bounds != sorted(set(bounds)):
            raise ValueError(
                f"--ping-ms {self.ping_ms}, --suspect-ms {self.suspect_ms}, --dead-after-ms "
                f"{self.dead_after_ms}, --lease-ms {self.lease_ms}: each must be greater than the one before"
            )
        return self

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        if (self.key_file is None) != (self.allowed_keys is None):
            raise ValueError(
                "--key-file and --allowed-keys go together: this node's own secret key, and who may connect"
            )
        try:
            check_bind_endpoint(self.bind, has_keys=self.key_file is not None)
        except ValueError as error:
            raise ValueError(f"--bind: {error}") from None
        return self

    def _engine_settings(self, lanes: int) -> EngineSettings:
        return EngineSettings(
            backend=self.backend,
            model=self.model,
            dtype=self.dtype,
            max_tokens=self.max_tokens,
            chunk_tokens=self.chunk_tokens,
            lanes=lanes,
            threads=thread_count(self.cpus),
            emulated_seed=self.emulated_seed,
            emulated_prefill_tokens_per_s=self.emulated_prefill_tokens_per_s,
            emulated_decode_ms=self.emulated_decode_ms,
            emulated_rope_form=self.emulated_rope_form,
            emulated_heads_reversed=self.emulated_heads_reversed,
        )


def flag_of(field_name: str) -> str:
    """The command line's name of a field."""
    return "--" + field_name.replace("_", "-")


def _readable(error: ValidationError, origins: Mapping[str, str]) -> str:
    """All faults in one line, in the words of the command line, with the places that are not flags."""
    faults = []
    for fault in error.errors(include_url=False):
        own_words = fault.get("ctx", {}).get("error")
        message = str(own_words or f"{fault['msg']}, not {fault['input']!r}")
        if fault["type"] == "extra_forbidden":
            message = "there is no such option"
        if not fault["loc"]:
            # A fault of several values together: any of them may be the wrong one.
            places = ", ".join(origins.values())
            faults.append(message + (f" (from {places})" if places else ""))
            continue
        name = str(fault["loc"][0])
        place = f" (from {origins[name]})" if name in origins else ""
        faults.append(f"{flag_of(name)}: {message}{place}")
    return "; ".join(faults)
