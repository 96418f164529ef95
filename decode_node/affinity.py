"""Which prefill node has computed prompts that begin alike.

Decides nothing by itself: it remembers where the blocks of prompts were sent last, so that
`decode_node.workers` can send a prompt where its beginning is likely to lie in a prefix cache. Changed by the
decode core alone. It guesses, as it cannot look into another node's cache: it must never be used for anything
but a preference.
"""

from collections import OrderedDict

from common.digests import block_keys

BLOCK_TOKENS = 64
BLOCKS_MAX = 16_384


class PrefixAffinity:
    """The prefill node that each of the last `blocks_max` blocks was sent to."""

    def __init__(self, blocks_max: int = BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._sent_to: OrderedDict[str, str] = OrderedDict()

    def known_tokens(self, root: bytes, prompt: bytes) -> dict[str, int]:
        """How much of the beginning of `prompt` (int32 little-endian ids) each prefill node was sent."""
        known: dict[str, int] = {}
        for number, key in enumerate(block_keys(root, prompt, BLOCK_TOKENS), start=1):
            worker = self._sent_to.get(key)
            if worker is None:
                break
            known[worker] = number * BLOCK_TOKENS
        return known

    def note(self, root: bytes, prompt: bytes, worker: str) -> None:
        """A prompt goes to that prefill node."""
        for key in block_keys(root, prompt, BLOCK_TOKENS):
            self._sent_to[key] = worker
            self._sent_to.move_to_end(key)
        while len(self._sent_to) > self._blocks_max:
            self._sent_to.popitem(last=False)

    def forget(self, worker: str) -> None:
        """The node has started anew, and has nothing of what it was sent before."""
        for key in [key for key, name in self._sent_to.items() if name == worker]:
            del self._sent_to[key]
