"""The import's copy against a plain memory copy.

Decides the comparison: one thread, one core, in alternation, the same piece size; source and destination are
mappings larger than the caches, and every round touches fresh ones. The digest is counted apart, as the
import itself counts it.
"""

import argparse
import mmap
import statistics
from typing import Any

import numpy as np
import xxhash
from rich.console import Console

from common.clock import now_us
from common.cpus import available_cpus, pin_process
from common.engines.registry import NAMED_MODEL, EngineSettings, load_decode_engine
from common.kv_convert import KvConverter
from common.kv_layout import KvLayout, chunk_bounds
from common.log import NodeLog
from common.messages import PrefillDone
from decode_node.kv_import import PIECE_BYTES, KvImport, KvSource
from transport.slab import Slab, SlabView


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=NAMED_MODEL, help=f"model ({NAMED_MODEL})")
    parser.add_argument("--tokens", type=int, default=384, help="tokens imported at a time (384)")
    parser.add_argument("--rounds", type=int, default=40, help="rounds (40)")


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    pin_process((max(available_cpus()),), NodeLog(node="bench", incarnation="bench"))
    settings = EngineSettings(backend="torch", model=options.model, max_tokens=512, threads=1)
    engine = load_decode_engine(settings)
    layout = engine.capabilities.layout
    byte_count = options.tokens * layout.token_bytes
    slot_count = max(4, 256 * 2**20 // layout.slot_bytes)
    slab = Slab(slot_count, layout.slot_bytes)
    try:
        form = engine.capabilities.form
        kv_source = KvSource(
            SlabView(slab.name, slot_count, layout.slot_bytes),
            layout,
            KvConverter(form, form, layout.head_dim),
        )
        records = [_fill(slab, layout, index, options.tokens) for index in range(slot_count)]
        source, target = mmap.mmap(-1, 256 * 2**20), mmap.mmap(-1, 256 * 2**20)
        copies_us, imports_us, digests_us = [], [], []
        for index in range(options.rounds):
            copies_us.append(_plain_copy(source, target, index, byte_count))
            kv = KvImport(kv_source, records[index % slot_count], engine, 0)
            for _ in kv.pieces():
                continue
            if kv.code is not None:
                raise SystemExit(f"the import failed: {kv.code} {kv.detail}")
            imports_us.append(kv.copy_us)
            digests_us.append(kv.digest_us)
    finally:
        slab.unlink()
    ratios = [plain / ours for plain, ours in zip(copies_us, imports_us, strict=True)]
    figures = {
        "bytes": byte_count,
        "piece_bytes": PIECE_BYTES,
        "plain_copy_us": statistics.median(copies_us),
        "import_copy_us": statistics.median(imports_us),
        "digest_us": statistics.median(digests_us),
        "import_rate_of_plain_copy": statistics.median(ratios),
        "plain_copy_gb_per_s": byte_count / statistics.median(copies_us) / 1e3,
        "digest_gb_per_s": byte_count / statistics.median(digests_us) / 1e3,
    }
    for name, value in figures.items():
        console.print(f"{name:28} {value:,.3f}" if isinstance(value, float) else f"{name:28} {value:,}")
    return figures


def _fill(slab: Slab, layout: KvLayout, index: int, token_count: int) -> PrefillDone:
    """Put noise into a slot; the record that goes with it."""
    slab.begin(index, 1)
    data = np.frombuffer(slab.slot(index), dtype="<f4").reshape(layout.shape)
    data[:] = np.random.default_rng(index).standard_normal(layout.shape[1:], dtype=np.float32)
    digests = []
    bounds = chunk_bounds(0, token_count, 128)
    for start, end in bounds:
        hasher = xxhash.xxh3_128()
        hasher.update(np.ascontiguousarray(data[:, :, start:end]))
        digests.append(hasher.digest())
    return PrefillDone(
        "bench",
        index,
        1,
        "",
        token_count,
        128,
        token_count * layout.token_bytes,
        tuple(digests),
        b"",
        b"",
        0,
        0,
    )


def _plain_copy(source: mmap.mmap, target: mmap.mmap, index: int, byte_count: int) -> int:
    """Copy that many bytes in pieces of the import's size, from and to memory not used lately."""
    room = len(source) // byte_count
    start = index % room * byte_count
    read, write = np.frombuffer(source, dtype=np.uint8), np.frombuffer(target, dtype=np.uint8)
    started_us = now_us()
    for at in range(start, start + byte_count, PIECE_BYTES):
        end = min(at + PIECE_BYTES, start + byte_count)
        write[at:end] = read[at:end]
    return now_us() - started_us
