"""Turns a GGUF file into a Hugging Face directory, once.

Decides how quantised weights become plain float32 ones and which tokenizer the file means. Called by
`model_files` under its lock. It must never guess: a file whose way of cutting text is not known here is
refused, since a near miss would give slightly worse answers without a word.
"""

import io
import struct
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from common.errors import ConfigError

# Counted up whenever the same GGUF would give other files than before.
CONVERSION_VERSION = 1

# Names that GGUF files give to ways of cutting text before the merges. The first cut as GPT-2 does; the
# second cut off every digit before that. Transformers takes them for the first, and "\n\n1" comes out
# differently.
_LIKE_GPT2 = {None, "gpt-2", "mpt", "olmo", "phi-2"}
_DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell"}

# What the readers raise for a file that is cut off or was never a GGUF.
_READ_ERRORS = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)


def convert_gguf(source: Path, target: Path) -> None:
    """Write configuration, float32 safetensors, tokenizer and chat template of `source` into `target`.

    Raises ConfigError when the file is damaged or its kind is not supported.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        _convert_tokenizer(source, target)
        with redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off otherwise
            _convert_weights(source, target)
    except _READ_ERRORS as error:
        raise ConfigError(f"cannot convert {source}: damaged, or of an unknown kind ({error})") from error


def _convert_tokenizer(source: Path, target: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    architecture, content, settings = get_gguf_tokenizer(str(source))
    backend, more_settings = convert_gguf_tokenizer(architecture, content)
    cut = content.get("pre_tokenizer_type")
    if content["tokenizer_type"] == "gpt2" and cut in _DIGITS_APART:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif content["tokenizer_type"] == "gpt2" and cut not in _LIKE_GPT2 | GGUF_PRE_TOKENIZER_SPLITS.keys():
        raise ConfigError(f"{source} cuts text in an unknown way ({cut}); use the model's own directory")
    PreTrainedTokenizerFast(tokenizer_object=backend, **settings, **more_settings).save_pretrained(target)


def _convert_weights(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    fields: dict[str, Any] = load_gguf_checkpoint(str(source))["config"]
    fields.pop("_model_name_or_path", None)
    config = AutoConfig.for_model(**fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(
        str(source), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
    )["tensors"]
    outcome = model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    absent = [name for name, weight in model.named_parameters() if weight.is_meta]
    if absent or outcome.unexpected_keys:
        raise ConfigError(f"cannot convert {source}: weights do not fit the model ({absent or outcome})")
    model.save_pretrained(target)
