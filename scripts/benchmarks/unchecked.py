"""A daemon without its safety checks, to measure what they cost: never to be used for anything else.

`python -m scripts.benchmarks.unchecked decode_node FLAGS...` switches off KV digests, sequence checks and the
checks of the cores inside this one process, then runs the node as it is. Decides which functions those are;
started by `robustness.py` alone. The product has no such switch, and must not get one. The digest of the
prompt stays on: the nodes compare it with the prompt, and a job without a true one fails.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

NODES = ("decode_node", "prefill_node")
NOTE = "unchecked: KV digests, sequence checks and ledger checks are off"
_DIGEST = bytes(16)


class _NoHasher:
    """What a hasher looks like to its user."""

    def update(self, data: Any) -> None:
        """Read nothing."""

    def digest(self) -> bytes:
        """The same for everything."""
        return _DIGEST


def _accept(session: Any, sequence: int, now_ms: int) -> bool:
    """In place of `Session.accept`: every message counts as a sign of life, whatever its number."""
    session.received, session.heard_ms = sequence, now_ms
    return True


def _replace(owner: ModuleType | type, name: str, value: Any) -> None:
    """Patch what exists; a name that has moved must not go unnoticed."""
    if not hasattr(owner, name):
        raise SystemExit(f"unchecked: {owner.__name__} has no {name} any more")
    setattr(owner, name, value)


def switch_off(node: str) -> None:
    """Patch the modules of one node."""
    peers = importlib.import_module("transport.peers")
    compute = importlib.import_module(f"{node}.compute")
    core = importlib.import_module(f"{node}.core")
    _replace(peers.Session, "accept", _accept)
    _replace(compute, "bytes_digest", lambda data: _DIGEST)
    if node == "decode_node":
        kv_import = importlib.import_module("decode_node.kv_import")
        _replace(kv_import, "xxhash", SimpleNamespace(xxh3_128=_NoHasher))
        _replace(core.DecodeCore, "check", lambda core: None)
    else:
        _replace(compute.PrefillCompute, "_digest", lambda compute, slot, start, end: _DIGEST)
        _replace(compute.PrefillCompute, "_intact", lambda compute, command: True)
        _replace(core.PrefillCore, "check", lambda core: None)


def main() -> int:
    """Patch, say so on stderr, run the node."""
    node = next(word for word in sys.argv[1:] if word in NODES)
    sys.argv.remove(node)
    switch_off(node)
    print(NOTE, file=sys.stderr, flush=True)
    return importlib.import_module(f"{node}.__main__").main()


if __name__ == "__main__":
    sys.exit(main())
