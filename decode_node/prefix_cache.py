"""The decode side's prefix cache, as the core sees it: what a job finds, holds and leaves there.

Decides what of a prompt need not be sent or computed, and which KV is kept when a lane has it. Part of the
decode core, called by its parts. A job holds what it found from the moment its slot is reserved; the lane
holds it while it is copied; nobody else may take those places. It must never let a job use KV that was not
verified: only what lies in a lane that decodes is kept.
"""

from dataclasses import dataclass
from typing import Any

from common.digests import PrefixIdentity
from common.prefix_commands import BlocksStored, StoreBlocks
from common.prefix_index import HeldPrefix, PrefixIndex
from decode_node.jobs import Job
from decode_node.lanes import Lane


@dataclass(frozen=True, slots=True)
class PrefixSettings:
    """places: blocks that the store holds; 0 is off. per_client: clients do not see each other's prompts.

    files: whether there is a directory for saved caches.
    """

    places: int
    identity: PrefixIdentity
    per_client: bool = False
    files: bool = False


class PrefixCache:
    """One index, and who holds what of it. Off when `settings` is None or has no places."""

    def __init__(self, settings: PrefixSettings | None) -> None:
        self._settings = settings
        self.index: PrefixIndex | None = None
        if settings is not None and settings.places:
            self.index = PrefixIndex(settings.places, settings.identity.block_tokens)

    @property
    def on(self) -> bool:
        return self.index is not None

    def name_root(self, job: Job) -> None:
        """Give a new job the name of those whose KV it may share."""
        if self._settings is not None:
            salt = f"client {job.client}" if self._settings.per_client else ""
            job.cache_digest = self._settings.identity.root(f"{salt}/{job.cache_salt or ''}")

    def hold(self, job: Job) -> int:
        """Look up and lock the longest usable prefix, unless the job has one; its length in tokens."""
        if self.index is None:
            return 0
        if job.prefix is None:
            match = self.index.match(job.cache_digest, job.prompt)
            job.prefix = HeldPrefix(self.index.lock(match), match)
        return job.prefix.tokens

    def move_to(self, lane: Lane, job: Job) -> None:
        """The lane copies from the job's prefix from now on."""
        lane.prefix, job.prefix = job.prefix, None

    def let_go(self, holder: Job | Lane) -> None:
        """A job has ended, or a lane has copied."""
        held, holder.prefix = holder.prefix, None
        if held is not None:
            self.index.unlock(held.lock)

    def forget(self, lane: Lane, place: int) -> None:
        """What the lane was to copy from that place is not what was put there."""
        held = lane.prefix
        self.index.forget(held.match.entries[held.places.index(place)])

    def note(self, job: Job, token_id: int) -> None:
        """The job has another token, whose KV its lane will hold."""
        if self.index is not None:
            job.generated.append(token_id)

    def keep(self, job: Job, lane: Lane, valid_tokens: int | None = None) -> list[Any]:
        """Store what the lane holds of the job: its prompt and what came of it, but for the last token.

        valid_tokens: how much that is, if it is not all. The blocks are promised: compute carries out its
        orders one after another, so the next job need not wait for the copy to find them.
        """
        if self.index is None:
            return []
        tokens = job.prompt + b"".join(token_id.to_bytes(4, "little") for token_id in job.generated)
        if valid_tokens is None:
            valid_tokens = len(tokens) // 4 - 1
        stores = self.index.plan_insert(job.cache_digest, tokens, valid_tokens, promised=True)
        return [StoreBlocks(lane.index, tuple(stores))] if stores else []

    def on_stored(self, event: BlocksStored, now_ms: int) -> list[Any]:
        for entry_id in event.stored:
            self.index.stored(entry_id)
        for entry_id in event.abandoned:
            self.index.abandon(entry_id)
        return []

    def status(self) -> dict[str, int] | None:
        return None if self.index is None else self.index.status()

    def check(self) -> None:
        """Raise `InvariantViolation` when the index contradicts itself."""
        if self.index is not None:
            self.index.check()
