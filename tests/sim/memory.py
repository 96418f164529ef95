"""The modelled KV: what compute writes, an import reads, and tokens follow from.

A slot holds an epoch word and one content number per chunk. The content of a chunk depends on every token up
to its end, a token on every content that was really read, so one foreign, torn or stale chunk makes a wrong
token. Numbers only: their hashes do not differ from run to run.
"""

from functools import lru_cache

from tests.sim.plan import CHUNK_TOKENS, JobPlan

MASK = 0x3FFFFFFF
TORN = 1 << 40
EOS_DIVISOR = 7
STOP_DIVISOR = 5


def mix(one: int, other: int) -> int:
    return hash((one, other)) & MASK


def next_token(folded: int) -> int:
    return mix(folded, 77)


@lru_cache(maxsize=4_096)
def prompt_bytes(prompt: tuple[int, ...]) -> bytes:
    return b"".join(token_id.to_bytes(4, "little") for token_id in prompt)


@lru_cache(maxsize=16_384)
def content_of(prompt: bytes, end: int) -> int:
    """The KV of the chunk that ends at token `end`."""
    token_ids = tuple(prompt[place] for place in range(0, 4 * end, 4))
    return hash((end, token_ids)) & MASK


def digest_of(content: int) -> bytes:
    return content.to_bytes(16, "little")


@lru_cache(maxsize=4_096)
def expected_tokens(job: JobPlan) -> tuple[int, ...]:
    """What one process, undisturbed, would answer."""
    folded, length = 0, len(job.prompt)
    for start in range(0, length, CHUNK_TOKENS):
        end = min(start + CHUNK_TOKENS, length)
        folded = hash((folded, hash((end, job.prompt[:end])) & MASK)) & MASK
    tokens: list[int] = []
    while len(tokens) < job.max_tokens:
        token = hash((folded, 77)) & MASK
        tokens.append(token)
        if (job.eos and token % EOS_DIVISOR == 0) or (job.stop and token % STOP_DIVISOR == 0):
            break
        folded = hash((folded, token)) & MASK
    return tuple(tokens)


class Slab:
    """The shared memory of one prefill process; outlives it in the mappings of others."""

    def __init__(self, slots: int) -> None:
        self.epochs = [0] * slots
        self.chunks: list[dict[int, int]] = [{} for _ in range(slots)]

    def begin(self, slot: int, epoch: int) -> None:
        """The epoch word, before the first byte of a production."""
        self.epochs[slot] = epoch

    def write(self, slot: int, start: int, content: int) -> None:
        self.chunks[slot][start] = content

    def read(self, slot: int, start: int) -> int:
        return self.chunks[slot].get(start, TORN)
