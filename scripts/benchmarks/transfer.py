"""How fast KV gets from one process to another, by each data plane, against what the machine can do.

Decides the comparison: all arms in one run, in alternation, sender and receiver on a core of their own, the
same frames in every arm. The bare raw loop sends a slot's frames over ZeroMQ and drops them; the other one
also copies them into a buffer. Tandem's tcp plane is its own bulk objects with credit and landing buffers,
once without digests and once with those of both nodes. Shared memory is the import's copy out of a slab
against a plain copy in pieces of the same size. With `--hosts` it is two daemons on two test hosts instead.
"""

import argparse
import mmap
import os
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import hosts
from benchmarks.figures import spread
from benchmarks.transfer_ends import ARMS, Load, ReceivingEnd, Run, SenderProcess, digest_of, noise
from common import limits
from common.clock import now_us
from common.cpus import pin_process
from common.errors import ConfigError, TandemError
from common.kv_convert import KvConverter, KvForm
from common.kv_layout import KvLayout, chunk_bounds
from common.log import NodeLog
from common.messages import PrefillDone
from decode_node.kv_import import PIECE_BYTES, KvImport, KvSource
from transport.launch.pair_plan import split_cpus
from transport.slab import Slab, SlabView

PROMPT_TOKENS = 1_024
CHUNK_TOKENS = 256
SHAPES = {
    "SmolLM2, float32": KvLayout(30, 3, 64, "float32", PROMPT_TOKENS),
    "32 layers of 8 x 128, bfloat16": KvLayout(32, 8, 128, "bfloat16", PROMPT_TOKENS),
}
PIECES = tuple(kib * 1_024 for kib in (256, 512, 1_024, 2_048, 4_096))
GOALS = {"tandem_of_raw_landed": 0.80, "digests_of_raw": 0.45, "shm_of_plain_copy": 0.70}
LARGE_BYTES = 256 * 2**20


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7, help="rounds of all arms, at least 3 (7)")
    parser.add_argument("--prompts", type=int, default=8, help="prompts sent in each round (8)")
    parser.add_argument("--pieces", action="store_true", help="also compare sizes of pieces")
    hosts.configure(parser)


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    if options.rounds < 3:
        raise ConfigError("--rounds: a median needs at least 3")
    if options.hosts is not None:
        return hosts.measure(options, console)
    load_before = os.getloadavg()[0]
    sender_cpus, receiver_cpus = split_cpus()
    pin_process(receiver_cpus or None, NodeLog(node="bench", incarnation="bench"))
    sizes = PIECES if options.pieces else (limits.KV_PIECE_BYTES,)
    usual_bytes = limits.KV_PIECE_BYTES
    figures: dict[str, Any] = {"prompt_tokens": PROMPT_TOKENS, "chunk_tokens": CHUNK_TOKENS, "shapes": {}}
    with SenderProcess(sender_cpus or None) as sender, ReceivingEnd(sender) as receiver:
        for name, layout in SHAPES.items():
            by_size = measure_tcp(receiver, layout, sizes, options, console)
            limits.KV_PIECE_BYTES = usual_bytes
            figures["shapes"][name] = {"tcp": by_size, "shm": measure_shm(layout, options.rounds)}
    figures["load_average"] = {"before": load_before, "after": os.getloadavg()[0]}
    _show(figures, console)
    return figures


def measure_tcp(
    receiver: ReceivingEnd,
    layout: KvLayout,
    sizes: tuple[int, ...],
    options: argparse.Namespace,
    console: Console,
) -> dict[int, dict[str, Any]]:
    """Rates (GB/s) and ratios for each size of pieces; a round takes all sizes and arms in turn."""
    loads = {size: Load(layout, CHUNK_TOKENS, options.prompts, size) for size in sizes}
    runs: dict[int, dict[str, list[Run]]] = {size: {arm: [] for arm in ARMS} for size in sizes}
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("transfer", total=(options.rounds + 1) * len(sizes))
        for number in range(options.rounds + 1):
            for size, load in loads.items():
                for arm in ARMS if number % 2 else reversed(ARMS):
                    run = receiver.run(arm, load)
                    if number:  # the first round touches the memory
                        runs[size][arm].append(run)
                progress.advance(bar)
    return {size: _figures(runs[size]) for size in sizes}


def _figures(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """By the clock, and under `by_cpu` by the CPU time of the busier end."""
    clock = {arm: [run.gb_per_s for run in of_arm] for arm, of_arm in runs.items()}
    cpu = {arm: [run.cpu_gb_per_s for run in of_arm] for arm, of_arm in runs.items()}
    return _rates(clock) | {"by_cpu": _rates(cpu)}


def _rates(rates: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "gb_per_s": {arm: spread(values) for arm, values in rates.items()},
        "tandem_of_raw_landed": _ratio(rates["tandem"], rates["raw_landed"]),
        "digests_of_raw": _ratio(rates["tandem_digests"], rates["raw"]),
    }


def _ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Round by round."""
    return spread([one / other for one, other in zip(ours, theirs, strict=True)])


class _Lane:
    """A lane of the wire's own layout, so that the import's copy is a copy and no conversion."""

    def __init__(self, layout: KvLayout) -> None:
        memory = np.frombuffer(mmap.mmap(-1, layout.slot_bytes), dtype=layout.numpy_dtype)
        self._rows = memory.reshape(layout.shape)

    def write_kv(self, lane: int, layer: int, start: int, piece: np.ndarray) -> None:
        self._rows[layer : layer + len(piece), :, start : start + piece.shape[2]] = piece

    def set_length(self, lane: int, length: int) -> None:
        """A lane without an engine has no length."""


def measure_shm(layout: KvLayout, rounds: int) -> dict[str, Any]:
    """The import out of a slab against a plain copy: slots and mappings larger than the caches, in turn."""
    slot_count = max(3, LARGE_BYTES // layout.slot_bytes)
    slab = Slab(slot_count, layout.slot_bytes)
    copies_us, imports_us, digests_us = [], [], []
    try:
        form = KvForm(layout.dtype)
        view = SlabView(slab.name, slot_count, layout.slot_bytes)
        kv_source = KvSource(view, layout, KvConverter(form, form, layout.head_dim))
        records = [_fill(slab, index, layout) for index in range(slot_count)]
        lanes = [_Lane(layout) for _ in range(slot_count)]
        source = np.frombuffer(mmap.mmap(-1, slot_count * layout.slot_bytes), dtype=np.uint8)
        target = np.frombuffer(mmap.mmap(-1, slot_count * layout.slot_bytes), dtype=np.uint8)
        source[:], target[:] = 1, 2
        for number in range(max(rounds, slot_count) + slot_count):
            index = number % slot_count
            start = index * layout.slot_bytes
            copied_us = _plain_copy(source, target, start, start + layout.slot_bytes)
            copy = KvImport(kv_source, records[index], lanes[index], 0)
            for _ in copy.pieces():
                continue
            if copy.code is not None:
                raise TandemError(f"the import failed: {copy.detail}")
            if number >= slot_count:  # before, it touches the memory
                copies_us.append(copied_us)
                imports_us.append(copy.copy_us)
                digests_us.append(copy.digest_us)
    finally:
        slab.unlink()
    return {
        "piece_bytes": PIECE_BYTES,
        "plain_copy_gb_per_s": spread([layout.slot_bytes / value / 1e3 for value in copies_us]),
        "import_gb_per_s": spread([layout.slot_bytes / value / 1e3 for value in imports_us]),
        "digest_gb_per_s": spread([layout.slot_bytes / value / 1e3 for value in digests_us]),
        "shm_of_plain_copy": spread(
            [plain / ours for plain, ours in zip(copies_us, imports_us, strict=True)]
        ),
    }


def _fill(slab: Slab, index: int, layout: KvLayout) -> PrefillDone:
    """Put noise into a slot; the record that goes with it."""
    slab.begin(index, 1)
    slot = slab.slot(index)
    slot[:] = noise(layout, index % 2)
    bounds = chunk_bounds(0, layout.max_tokens, CHUNK_TOKENS)
    return PrefillDone(
        job_id="bench",
        slot=index,
        epoch=1,
        prompt_digest="",
        token_count=layout.max_tokens,
        chunk_tokens=CHUNK_TOKENS,
        byte_count=layout.slot_bytes,
        chunk_digests=tuple(digest_of(slot, start, end, layout) for start, end in bounds),
        logits=b"",
        logits_digest=b"",
        queue_us=0,
        compute_us=0,
    )


def _plain_copy(source: np.ndarray, target: np.ndarray, start: int, end: int) -> int:
    """Copy in pieces of the import's size; microseconds."""
    started_us = now_us()
    for at in range(start, end, PIECE_BYTES):
        stop = min(at + PIECE_BYTES, end)
        target[at:stop] = source[at:stop]
    return now_us() - started_us


def _show(figures: dict[str, Any], console: Console) -> None:
    for name, shape in figures["shapes"].items():
        table = Table(title=f"{name}: {PROMPT_TOKENS} tokens in chunks of {CHUNK_TOKENS}; GB/s, medians")
        for column in ("piece", *(arm.replace("_", ", ") for arm in ARMS), "tandem/landed", "digests/raw"):
            table.add_column(column, justify="right")
        for size, by_size in shape["tcp"].items():
            for label, rates in (("", by_size), (" by CPU", by_size["by_cpu"])):
                cells = [f"{rates['gb_per_s'][arm]['median']:.2f}" for arm in ARMS]
                cells += [f"{rates[key]['median']:.2f}" for key in ("tandem_of_raw_landed", "digests_of_raw")]
                table.add_row(f"{size // 1_024} KiB{label}", *cells)
        console.print(table)
        shm = shape["shm"]
        console.print(
            f"shm: import {shm['import_gb_per_s']['median']:.2f} GB/s, plain copy"
            f" {shm['plain_copy_gb_per_s']['median']:.2f} GB/s,"
            f" ratio {shm['shm_of_plain_copy']['median']:.2f};"
            f" digest apart {shm['digest_gb_per_s']['median']:.1f} GB/s"
        )
        if len(shape["tcp"]) > 1:
            console.print(
                f"best size of pieces, by the rate with digests: {best_size(shape['tcp']) // 1_024} KiB"
            )
    goals = ", ".join(f"{key.replace('_', ' ')} {goal}" for key, goal in GOALS.items())
    console.print(f"goals: {goals}")
    loads = figures["load_average"]
    console.print(f"load average {loads['before']:.2f} before, {loads['after']:.2f} after")


def best_size(by_size: dict[int, dict[str, Any]]) -> int:
    """The size of pieces that moves most when everything is on."""
    return max(by_size, key=lambda size: by_size[size]["gb_per_s"]["tandem_digests"]["median"])
