"""The emulated model's tokenizer: bytes.

Decides how text becomes ids for the emulated backends and back. Loaded by `common/engines/registry.py` for
the text thread; `common/engines/emulated.py` takes its vocabulary from here. It must never refuse ids that
the model made, nor depend on `--model`.
"""

BOS = 256
EOS = 257
END_OF_TURN = 258
VOCAB_SIZE = 259

_CHAT_ROLES = frozenset({"system", "user", "assistant", "tool"})


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and three special ids behind them."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = frozenset({EOS})

    def encode(self, text: str) -> list[int]:
        """Bytes of the text. Raises ValueError for text that has no UTF-8 form (lone surrogates)."""
        return list(text.encode())

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """BOS, then `role: content` and END_OF_TURN for each message, then `assistant: `.

        Raises ValueError for no message, an unknown role, or a content that is not text.
        """
        if not messages:
            raise ValueError("a conversation needs at least one message")
        token_ids = [BOS]
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if role not in _CHAT_ROLES:
                raise ValueError(f"role {role!r} is none of {sorted(_CHAT_ROLES)}")
            if not isinstance(content, str):
                raise ValueError(f"the content of a {role} message is not text")
            token_ids += [*self.encode(f"{role}: {content}"), END_OF_TURN]
        return token_ids + self.encode("assistant: ")

    def decode(self, token_ids: list[int]) -> str:
        """Text of the bytes among the ids; what is not UTF-8 becomes U+FFFD."""
        return bytes(token_id for token_id in token_ids if token_id < BOS).decode(errors="replace")
