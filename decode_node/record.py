"""Whether a terminal record is the one that was asked for.

Decides, by comparison alone, if a PREFILL_DONE fits its job; asked by the core before anything of the record
is used. The bytes themselves are verified by the compute thread: logits before the first token is sampled,
KV after the copy and before the first step.
"""

from common.kv_layout import chunk_bounds
from common.messages import PrefillDone
from decode_node.jobs import Job
from decode_node.settings import DecodeSettings

CHUNK_DIGEST_BYTES = 16


def record_problem(record: PrefillDone, job: Job, settings: DecodeSettings) -> str | None:
    """What is wrong with the record, or None."""
    prompt_tokens, token_bytes = job.prompt_tokens, settings.token_bytes
    vocab_size = settings.profile.vocab_size
    if record.prompt_digest != job.prompt_digest:
        return "the record is of another prompt"
    if record.token_count != prompt_tokens:
        return f"the record covers {record.token_count} tokens of {prompt_tokens}"
    if record.byte_count != prompt_tokens * token_bytes:
        return f"the record covers {record.byte_count} bytes of {prompt_tokens * token_bytes}"
    if record.chunk_tokens < 1:
        return "the record has no chunk size"
    chunk_count = len(chunk_bounds(0, prompt_tokens, record.chunk_tokens))
    if len(record.chunk_digests) != chunk_count:
        return f"the record has {len(record.chunk_digests)} digests for {chunk_count} chunks"
    if any(len(digest) != CHUNK_DIGEST_BYTES for digest in record.chunk_digests):
        return "the record has a malformed digest"
    if len(record.logits) != 4 * vocab_size:
        return f"the record has {len(record.logits)} bytes of logits for {vocab_size} ids"
    return None
