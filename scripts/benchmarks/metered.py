"""A daemon that tells how much of its CPU time its engine took, and where the rest went.

`python -m scripts.benchmarks.metered FLAGS... METER decode_node FLAGS...` runs the node as it is, with an
engine whose calls are clocked. METER is a file of three int64 that this process keeps up to date: nanoseconds
of CPU time in the engine, and the kernel's numbers of the compute and the text thread. With `METER.profiles/`
there, each thread is profiled as well, which makes everything slower, and leaves its profile there. Started
by `scheduler.py` alone; it must never change what a node does.
"""

import cProfile
import importlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from common import clock

NODES = ("decode_node", "prefill_node")
CLOCKED = ("prefill_chunk", "step", "write_kv", "read_kv", "set_length")
ENGINE_NS, COMPUTE_THREAD, TEXT_THREAD = range(3)


class MeteredEngine:
    """An engine whose calls add what they take to the meter."""

    def __init__(self, engine: Any, meter: np.ndarray) -> None:
        self._engine = engine
        for name in CLOCKED:
            if hasattr(engine, name):
                setattr(self, name, _clocked(getattr(engine, name), meter))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _clocked(call: Callable[..., Any], meter: np.ndarray) -> Callable[..., Any]:
    def clocked(*arguments: Any) -> Any:
        started_ns = clock.thread_cpu_ns()
        try:
            return call(*arguments)
        finally:
            meter[ENGINE_NS] += clock.thread_cpu_ns() - started_ns

    return clocked


def _watch(module: Any, name: str, meter: np.ndarray, thread: int) -> None:
    """Have a loader note its thread, and clock what it loads if that is an engine."""
    load = getattr(module, name)

    def loaded(*arguments: Any) -> Any:
        meter[thread] = threading.get_native_id()
        result = load(*arguments)
        return MeteredEngine(result, meter) if thread == COMPUTE_THREAD else result

    setattr(module, name, loaded)


def _profiled(directory: Path) -> Callable[..., Any]:
    """A way to call a thread's work that leaves its profile in the directory."""

    def profiled(work: Callable[..., Any], *arguments: Any) -> Any:
        profile = cProfile.Profile(clock.thread_cpu_ns, 1e-9)
        try:
            return profile.runcall(work, *arguments)
        finally:
            profile.dump_stats(directory / f"{threading.current_thread().name}.prof")

    return profiled


def main() -> int:
    """Patch the loaders of one node, run it."""
    node = next(word for word in sys.argv[1:] if word in NODES)
    place = sys.argv.index(node)
    path = Path(sys.argv[place - 1])
    del sys.argv[place - 1 : place + 1]
    meter = np.memmap(path, dtype=np.int64, mode="w+", shape=(3,))
    compute = importlib.import_module(f"{node}.compute")
    _watch(compute, f"load_{node.removesuffix('_node')}_engine", meter, COMPUTE_THREAD)
    if node == "decode_node":
        _watch(importlib.import_module("decode_node.text_thread"), "load_tokenizer", meter, TEXT_THREAD)
    entry = importlib.import_module(f"{node}.__main__").main
    directory = path.with_suffix(".profiles")
    if not directory.exists():
        return entry()
    profiled = _profiled(directory)
    mailbox = importlib.import_module("transport.loop").Mailbox
    guard = mailbox.guard
    mailbox.guard = lambda self, work: guard(self, lambda: profiled(work))
    return profiled(entry)


if __name__ == "__main__":
    sys.exit(main())
