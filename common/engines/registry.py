"""Which backends exist, and the only door through which an engine is loaded.

The table says what each backend can do without importing it, so that a command line is refused before torch
or a model is looked at. The loaders import lazily for the same reason. Called by the configuration and by the
compute and text threads of both nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # numpy would make --help wait
    from common.engines.interface import DecodeEngine, PrefillEngine, Tokenizer

# Served unless --model says otherwise; scripts/fetch_model.py has it ready.
NAMED_MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class BackendFacts:
    """What is known of a backend before it is loaded. `lanes_max` is 0 when it cannot decode."""

    prefill: bool
    lanes_max: int
    local_prefill: bool
    emulated: bool


BACKENDS: dict[str, BackendFacts] = {
    "torch": BackendFacts(prefill=True, lanes_max=256, local_prefill=True, emulated=False),
    "emulated": BackendFacts(prefill=True, lanes_max=256, local_prefill=True, emulated=True),
    "rngd": BackendFacts(prefill=True, lanes_max=0, local_prefill=False, emulated=True),
    "atom": BackendFacts(prefill=False, lanes_max=1, local_prefill=False, emulated=True),
}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is loaded with; the flags of the same names say what each means.

    max_tokens and chunk_tokens: None takes the backend's own default. threads: compute threads. The
    `emulated_*` fields are read by the emulated backends alone; None takes the profile's value.
    """

    backend: str
    model: str
    dtype: str = "float32"
    max_tokens: int | None = None
    chunk_tokens: int | None = None
    lanes: int = 1
    threads: int = 1
    emulated_seed: int = 0
    emulated_prefill_tokens_per_s: float | None = None
    emulated_decode_ms: float | None = None
    emulated_rope_form: str = "half"
    emulated_heads_reversed: bool = False
    emulated_no_logits: bool = False


def load_prefill_engine(settings: EngineSettings) -> PrefillEngine:
    """Load the prefill side of a backend. Raises `ConfigError` naming the model problem and its remedy."""
    if BACKENDS[settings.backend].emulated:
        from common.engines.emulated import EmulatedPrefillEngine

        return EmulatedPrefillEngine(settings)
    from common.engines.model_files import resolve_model

    resolve_model(settings.model)  # a wrong path shows before the seconds that importing torch takes
    from common.engines.torch_engine import TorchPrefillEngine

    return TorchPrefillEngine(settings)


def load_decode_engine(settings: EngineSettings) -> DecodeEngine:
    """Load the decode side of a backend. Raises `ConfigError` naming the model problem and its remedy."""
    if BACKENDS[settings.backend].emulated:
        from common.engines.emulated import EmulatedDecodeEngine

        return EmulatedDecodeEngine(settings)
    from common.engines.model_files import resolve_model

    resolve_model(settings.model)  # a wrong path shows before the seconds that importing torch takes
    from common.engines.torch_engine import TorchDecodeEngine

    return TorchDecodeEngine(settings)


def load_tokenizer(settings: EngineSettings) -> Tokenizer:
    """Load the tokenizer that belongs to the backend's model. Raises `ConfigError` like the engines."""
    if BACKENDS[settings.backend].emulated:
        from common.engines.byte_tokenizer import ByteTokenizer

        return ByteTokenizer()
    from common.engines.model_files import load_hugging_face_tokenizer

    return load_hugging_face_tokenizer(settings.model)
