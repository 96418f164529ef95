"""Whether a terminal record is the one that was asked for.

Decides, by comparison alone, if a PREFILL_DONE is what its PREFILL asked for; asked by the core before
anything of the record is used. The bytes themselves are verified by the compute thread: logits before the
first token is sampled, KV after the copy and before the first step.
"""

from dataclasses import dataclass

from common.kv_layout import chunk_bounds
from common.messages import PrefillDone

CHUNK_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Expected:
    """What a PREFILL asked for. token_bytes: KV bytes of one token as they are handed over.

    vocab_size: 0 when the prefill node answers no logits. It is then asked for all tokens but the last.
    """

    prompt_digest: str
    token_count: int
    send_from: int
    token_bytes: int
    vocab_size: int


def record_problem(record: PrefillDone, expected: Expected) -> str | None:
    """What is wrong with the record, or None."""
    token_count = expected.token_count
    sent_bytes = (token_count - expected.send_from) * expected.token_bytes
    if record.prompt_digest != expected.prompt_digest:
        return "the record is of another prompt"
    if record.token_count != token_count:
        return f"the record covers {record.token_count} tokens of {token_count}"
    if record.byte_count != sent_bytes:
        return f"the record covers {record.byte_count} bytes of {sent_bytes}"
    if record.chunk_tokens < 1:
        return "the record has no chunk size"
    chunk_count = len(chunk_bounds(expected.send_from, token_count, record.chunk_tokens))
    if len(record.chunk_digests) != chunk_count:
        return f"the record has {len(record.chunk_digests)} digests for {chunk_count} chunks"
    if any(len(digest) != CHUNK_DIGEST_BYTES for digest in record.chunk_digests):
        return "the record has a malformed digest"
    if len(record.logits) != 4 * expected.vocab_size:
        return f"the record has {len(record.logits)} bytes of logits for {expected.vocab_size} ids"
    return None
