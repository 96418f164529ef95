"""Text to ids and back, as a Hugging Face directory describes it.

Decides how a real model's text is cut. Made by `model_files.load_hugging_face_tokenizer` for the decode
node's text thread. It must never look anything up on a network. Torch and transformers take seconds to import
and are not needed here, so only the first chat imports them; a daemon has them by then.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer

from common.errors import ConfigError

# Tokens that end an answer in the chat forms in use, whether or not a model's configuration lists them.
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>")


class HuggingFaceTokenizer:
    """`Tokenizer` of a model directory. `vocab_size` is the model's: ids up to it may be sampled.

    Raises ConfigError when the directory has no readable `tokenizer.json`.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{directory} has no tokenizer.json; save the tokenizer there in its fast form, "
                f"with save_pretrained of transformers"
            )
        try:
            self._backend = BackendTokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more special
            raise ConfigError(f"cannot read {path}: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        model = read_json(directory / "config.json")
        settings = read_json(directory / "tokenizer_config.json")
        self.vocab_size = _text_field(model, "vocab_size") or self._backend.get_vocab_size()
        self._named_tokens = {
            name: _token_text(settings[name]) for name in ("bos_token", "eos_token") if settings.get(name)
        }
        generation = read_json(directory / "generation_config.json")
        self.eos_token_ids = self._end_ids(_text_field(model, "eos_token_id"), generation.get("eos_token_id"))
        self._chat_template = _chat_template(directory, settings)

    def _end_ids(self, *configured: Any) -> frozenset[int]:
        ids: set[int] = set()
        for value in configured:
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
        for token in (self._named_tokens.get("eos_token"), *_END_TOKENS):
            if token is not None and (token_id := self._backend.token_to_id(token)) is not None:
                ids.add(token_id)
        return frozenset(ids)

    def encode(self, text: str) -> list[int]:
        """Ids of raw text; begins with BOS if the model's raw form does, and never twice."""
        begun = text.startswith(self._named_tokens.get("bos_token", "\0"))
        return self._backend.encode(text, add_special_tokens=not begun).ids

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation, ready for the assistant's answer.

        Raises ValueError without a template, and for messages that do not fit it.
        """
        if self._chat_template is None:
            raise ValueError("the model has no chat template")
        if not messages:
            raise ValueError("a conversation needs at least one message")
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, _ = render_jinja_template(
                [messages],
                chat_template=self._chat_template,
                add_generation_prompt=True,
                **self._named_tokens,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ValueError(f"the messages do not fit the model's chat template: {error}") from error
        return self._backend.encode(rendered[0], add_special_tokens=False).ids

    def decode(self, token_ids: list[int]) -> str:
        """Text of ids without the special ones, every space as it was."""
        return self._backend.decode(token_ids, skip_special_tokens=True)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file. Raises ConfigError when it is broken."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"cannot read {path}: not a JSON object")
    return content


def _text_field(model: dict[str, Any], name: str) -> Any:
    """A field of the configuration, or of its text part where a model has several parts."""
    return model.get(name, model.get("text_config", {}).get(name))


def _token_text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _chat_template(directory: Path, settings: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
