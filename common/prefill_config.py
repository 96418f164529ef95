"""The options of a prefill node, beside those of `common.config`.

Decides their defaults and ranges, and what goes with what. Used by the node itself, by whoever launches one
and by the documents' tables; it must never import what only a running node needs.
"""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    Field,
    model_validator,
)

from common.config import BindEndpoint, Flag, NodeConfig
from common.endpoints import PORT_MAX
from common.engines.registry import BACKENDS, EngineSettings
from common.kv_layout import check_conversion
from common.limits import SOURCE_SLOTS


class PrefillConfig(NodeConfig):
    """One prefill node. Construction raises `ConfigError`."""

    program: ClassVar[str] = "prefill_node"

    bind: BindEndpoint = Field(
        "tcp://127.0.0.1:5701", description="where decode nodes connect: tcp://HOST:PORT or ipc://PATH"
    )
    backend: Annotated[str, Flag("|".join(name for name, facts in BACKENDS.items() if facts.prefill))] = (
        Field("torch", description="what computes")
    )
    kv_port: Annotated[int, Field(ge=0, le=PORT_MAX), Flag("PORT")] = Field(
        0, description="first TCP port for KV, one for each decode node at a time; 0 lets the system choose"
    )
    source_slots: Annotated[int, Field(ge=1, le=SOURCE_SLOTS), Flag("N")] = Field(
        1, description="prompts whose KV is held at once, computing or waiting to be fetched"
    )
    slots_per_session: Annotated[
        Annotated[int, Field(ge=1, le=SOURCE_SLOTS)] | None, Flag("N", unset="an equal share")
    ] = Field(
        None,
        description="most slots that one decode node is granted; several decode nodes share them equally",
    )
    kv_wire_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = Field(
        "auto",
        description="number format in which KV is sent; auto is the engine's own and changes nothing. Fewer "
        "bytes per token cost exactness and the time to convert: of float32's bytes, bfloat16 and float16 "
        "send half, int8 a good quarter",
    )
    emulated_no_logits: bool = Field(
        False,
        description="emulated backends: answer no logits, like an engine that has none; the decode node then "
        "computes the last prompt token",
    )

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        facts = BACKENDS.get(self.backend)
        if facts is None or not facts.prefill:
            usable = ", ".join(name for name, known in BACKENDS.items() if known.prefill)
            fault = "there is no such backend" if facts is None else "it cannot prefill"
            raise ValueError(f"--backend {self.backend}: {fault}; use one of {usable}")
        return self

    @model_validator(mode="after")
    def _check_wire_dtype(self) -> Self:
        if self.kv_wire_dtype != "auto":
            engine_dtype = "uint8" if BACKENDS[self.backend].emulated else self.dtype
            try:
                check_conversion(engine_dtype, self.kv_wire_dtype)
            except ValueError as error:
                raise ValueError(f"--kv-wire-dtype {self.kv_wire_dtype}: {error}; use auto") from None
        return self

    def engine_settings(self) -> EngineSettings:
        """What the prefill engine is loaded with."""
        return replace(self._engine_settings(lanes=0), emulated_no_logits=self.emulated_no_logits)
