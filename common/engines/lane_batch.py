"""What lets one forward pass compute one token of each of several lanes.

Decides how the lanes of a decode step share the weights and nothing else: each linear layer reads its weights
once for all rows, and each lane is attended over by itself, over views of its own KV that end at its own
length. Called by `torch_engine` on the compute thread. It must never read a lane that takes no part in the
step, nor a position beyond a lane's length, and never let a row's result depend on what the others hold.

Rows are computed in one of two ways, by their number alone. Up to `NARROW_ROWS`, they are filled up to a
multiple of `ROW_STEP` and the weights are the left factor: the matrix library then takes the weights as they
lie, which costs hardly more for four rows than for one, and gives a row the same bits for every such number
of rows. Above, or in another dtype than float32, the usual form is faster.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from common.engines.slab_cache import SlabLayer, slab_attention

ROW_STEP = 4
NARROW_ROWS = 8


def batch_rows(lane_count: int) -> int:
    """How many rows a step of so many lanes is computed with; those behind the lanes' own are thrown away."""
    return lane_count if lane_count > NARROW_ROWS else -(-lane_count // ROW_STEP) * ROW_STEP


class LaneLinear(torch.nn.Linear):
    """A linear layer, `[row, token, in]` to `[row, token, out]`, that is fast for a few rows of one token."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.shape[0]
        if rows == 1 or rows > NARROW_ROWS:
            return torch.nn.functional.linear(hidden, self.weight, self.bias)
        output = torch.mm(self.weight, hidden.reshape(rows, -1).t()).t().contiguous()[:, None]
        return output if self.bias is None else output.add_(self.bias)


def speed_up_rows(model: torch.nn.Module) -> None:
    """Have the float32 linear layers of a model compute a few rows in the faster way."""
    for module in model.modules():
        if type(module) is torch.nn.Linear and module.weight.dtype == torch.float32:
            module.__class__ = LaneLinear


class LaneViews(list[torch.Tensor]):
    """Keys or values of the lanes of a step, one view `[1, kv_head, length, head_dim]` each."""


class LanesLayer(SlabLayer):
    """One layer of all lanes, keys and values `[lane, kv_head, max_tokens, head_dim]`.

    `lanes` take part in the step, and `positions` are where they write; both `[lane]`, as tensors and listed.
    """

    lanes: torch.Tensor
    positions: torch.Tensor
    listed: Sequence[tuple[int, int]] = ()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[LaneViews, LaneViews]:
        """Write each lane's new position; return each lane's positions up to its own, as views."""
        both = LaneViews(), LaneViews()
        pairs = ((self.keys, key_states), (self.values, value_states))
        for views, (memory, states) in zip(both, pairs, strict=True):
            memory[self.lanes, :, self.positions] = states[: len(self.listed), :, 0]
            views += [memory[lane : lane + 1, :, : position + 1] for lane, position in self.listed]
        return both


class LanesCache(Cache):
    """The cache of a step of several lanes.

    `memory` is `[layer, 2, lane, kv_head, max_tokens, head_dim]`; the cache never copies it.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__(layers=[LanesLayer(layer[0], layer[1]) for layer in memory])

    def begin(self, listed: Sequence[tuple[int, int]]) -> None:
        """Say which lanes the next forward pass computes, and the position that each writes."""
        lanes, positions = torch.tensor(listed).unbind(1)
        for layer in self.layers:
            layer.lanes, layer.positions, layer.listed = lanes, positions, listed
            layer.start = int(positions.max())


def lanes_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | LaneViews,
    value: torch.Tensor | LaneViews,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`slab_attention`; for several lanes that of each lane by itself, with the bits that it has alone.

    Query `[row, head, 1, dim]` to `[row, 1, head, dim]`. Rows behind the lanes' own give 0.
    """
    if not isinstance(key, LaneViews):
        return slab_attention(module, query, key, value, attention_mask, **kwargs)
    rows, heads, _, dim = query.shape
    output = query.new_zeros(rows, 1, heads, dim)
    for row, (keys, values) in enumerate(zip(key, value, strict=True)):
        output[row] = slab_attention(module, query[row : row + 1], keys, values, None, **kwargs)[0][0]
    return output, None
