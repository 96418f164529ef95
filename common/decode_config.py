"""The options of a decode node, beside those of `common.config`.

Decides their defaults and ranges, and which routes of a prompt exist. Used by the node itself, by whoever
launches one and by the documents' tables; it must never import what only a running node needs.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    model_validator,
)

from common.config import (
    TOKENS_MAX,
    BindEndpoint,
    ConnectEndpoint,
    Directory,
    Flag,
    Milliseconds,
    Name,
    NodeConfig,
)
from common.engines.registry import BACKENDS, EngineSettings
from common.limits import MAILBOX_ITEMS
from common.prefetch_route import check_prefetch_route

QUEUE_MAX = MAILBOX_ITEMS // 4  # each waiting job may put several commands into the threads' queues


def _listed(value: Any) -> Any:
    """As a person writes several: with commas between."""
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


def _distinct(endpoints: tuple[str, ...]) -> tuple[str, ...]:
    twice = sorted({endpoint for endpoint in endpoints if endpoints.count(endpoint) > 1})
    if twice:
        raise ValueError(f"{twice[0]} is given twice: each prefill node once")
    return endpoints


PrefillWorkers = Annotated[tuple[ConnectEndpoint, ...], BeforeValidator(_listed), AfterValidator(_distinct)]


class DecodeConfig(NodeConfig):
    """One decode node. Construction raises `ConfigError`."""

    program: ClassVar[str] = "decode_node"

    bind: BindEndpoint = Field(
        "tcp://127.0.0.1:5700", description="where clients connect: tcp://HOST:PORT or ipc://PATH"
    )
    backend: Annotated[str, Flag("|".join(name for name, facts in BACKENDS.items() if facts.lanes_max))] = (
        Field("torch", description="what computes")
    )
    slots: Annotated[int, Flag("N")] = Field(1, description="lanes: requests decoded at once")
    pd_prefill_worker: Annotated[PrefillWorkers, Flag("ENDPOINT[,ENDPOINT...]")] = Field(
        (), description="prefill nodes to use; without one, prompts are computed here"
    )
    server_key: Annotated[Annotated[tuple[Name, ...], BeforeValidator(_listed)], Flag("FILE[,FILE...]")] = (
        Field(
            (),
            description="public key of the prefill node, when this node has a --key-file; one for each of "
            "them, or one for all",
        )
    )
    prefix_cache_scope: Literal["shared", "client"] = Field(
        "shared",
        description="whose prompts find each other in the prefix caches: everybody's, or only those that one "
        "client sends over one connection",
    )
    prefix_cache_dir: Annotated[Directory | None, Flag("DIR")] = Field(
        None, description="directory where scripts/cache.py may save the prefix cache, and load it from"
    )
    pd_remote_only: bool = Field(False, description="never compute a prompt here")
    pd_prefetch_next: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto"] | None,
        BeforeValidator(lambda value: None if value == "off" else value),
        Flag("DEPTH|auto", bare="1", unset="off"),
    ] = Field(
        None,
        description="have the prefill node work ahead on DEPTH queued requests while this node decodes; "
        "1 when DEPTH is left out, auto follows what prompts and lanes take, and off turns it off",
    )
    min_remote_prompt_tokens: Annotated[
        Annotated[int, Field(ge=0, le=TOKENS_MAX)] | Literal["auto"], Flag("TOKENS|auto")
    ] = Field(
        0,
        description="shorter prompts are computed here, where that is allowed; auto measures the pair and "
        "its link while it works; bench.py worth says what pays",
    )
    on_prefill_failure: Literal["fail", "retry", "local"] = Field(
        "fail",
        description="when remote prefill fails: fail the request, send its prompt again, or compute it here",
    )
    prefill_retries: Annotated[int, Field(ge=1, le=100), Flag("N")] = Field(
        1, description="how often --on-prefill-failure retry sends one prompt again"
    )
    max_queue: Annotated[int, Field(ge=1, le=QUEUE_MAX), Flag("N")] = Field(
        256, description="requests that may wait; further ones are answered BUSY"
    )
    prefill_timeout_ms: Annotated[Milliseconds, Flag("MS")] = Field(
        120_000, description="time for the prefill node to compute one prompt, in ms"
    )
    prefill_wait_ms: Annotated[Milliseconds, Flag("MS")] = Field(
        10_000, description="how long a request waits while no prefill node is usable, in ms"
    )
    job_timeout_ms: Annotated[Milliseconds, Flag("MS")] = Field(
        600_000, description="time for a request from its acceptance to its last token, in ms"
    )

    @model_validator(mode="after")
    def _check_server_key(self) -> Self:
        if self.server_key and self.key_file is None:
            raise ValueError("--server-key needs --key-file: both ends of a connection have keys, or neither")
        if self.key_file is not None and self.pd_prefill_worker and not self.server_key:
            raise ValueError(
                "--key-file with --pd-prefill-worker needs --server-key, the prefill node's public key: a "
                "node with keys uses them on every connection"
            )
        keys, workers = len(self.server_key), len(self.pd_prefill_worker)
        if keys > 1 and keys != workers:
            raise ValueError(
                f"--server-key names {keys} keys, and --pd-prefill-worker {workers} prefill nodes: give one "
                "key for each of them, in the same order, or one that all of them have"
            )
        return self

    @model_validator(mode="after")
    def _check_short_prompts(self) -> Self:
        if self.min_remote_prompt_tokens and self.pd_remote_only:
            raise ValueError(
                "--pd-remote-only forbids the local prefill that --min-remote-prompt-tokens asks for: "
                "leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_route(self) -> Self:
        check_prefetch_route(
            prefill_workers=self.pd_prefill_worker,
            remote_only=self.pd_remote_only,
            backend=self.backend,
            slots=self.slots,
            prefetch_depth=self.prefetch_depth,
            on_prefill_failure=self.on_prefill_failure,
        )
        return self

    def server_key_of(self, worker: str) -> str | None:
        """The file with the public key of one of the prefill nodes, None when there are no keys."""
        if len(self.server_key) <= 1:
            return next(iter(self.server_key), None)
        return self.server_key[self.pd_prefill_worker.index(worker)]

    @property
    def prefetch_depth(self) -> int:
        """Prefetches held at a time, or the least of them; 0 when prefetch is off."""
        return 1 if self.prefetch_auto else self.pd_prefetch_next or 0

    @property
    def prefetch_auto(self) -> bool:
        """Whether the depth follows what is measured."""
        return self.pd_prefetch_next == "auto"

    @property
    def min_remote_tokens(self) -> int | None:
        """The shortest prompt for a prefill node; None to follow what is measured."""
        return None if self.min_remote_prompt_tokens == "auto" else self.min_remote_prompt_tokens

    def engine_settings(self) -> EngineSettings:
        """What the decode engine is loaded with."""
        return self._engine_settings(lanes=self.slots)
