"""Small statistics and the prompts that all benchmarks share.

Decides how a distribution is summed up and which text prompts are cut from. The text is this repository's
licence: real English that every checkout has.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

from common.engines.registry import EngineSettings, load_tokenizer

LICENCE = Path(__file__).resolve().parent.parent.parent / "LICENSE"


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, extremes and count."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "count": len(values),
    }


def prompts(backend: str, model: str, lengths: Sequence[int]) -> list[list[int]]:
    """One prompt of each length, in token ids, from different places of the licence."""
    tokenizer = load_tokenizer(EngineSettings(backend=backend, model=model))
    ids = tokenizer.encode(LICENCE.read_text())
    step = max(1, (len(ids) - max(lengths)) // len(lengths))
    return [ids[index * step : index * step + length] for index, length in enumerate(lengths)]


def even(low: int, high: int, count: int) -> list[int]:
    """`count` whole numbers from low to high, shuffled in a fixed way so that neighbours differ."""
    numbers = [round(low + (high - low) * index / max(1, count - 1)) for index in range(count)]
    return [numbers[index * 5 % count] for index in range(count)] if count % 5 else numbers
