"""The one source of randomness of a simulated run."""

import random
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


class Choices:
    """Everything that is left to chance; the seed alone decides it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._random = random.Random(seed)

    def below(self, bound: int) -> int:
        """A number in `[0, bound)`."""
        return int(self._random.random() * bound)

    def chance(self, share: float) -> bool:
        """True in `share` of the cases."""
        return self._random.random() < share

    def one_of(self, items: Sequence[Item]) -> Item:
        return items[int(self._random.random() * len(items))]

    def some_of(self, items: Sequence[Item]) -> list[Item]:
        """A random subset, its size drawn first: a few and nearly all come as often as half of them."""
        return self._random.sample(items, self.below(len(items) + 1))
