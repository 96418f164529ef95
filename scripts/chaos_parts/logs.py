"""What the daemons' logs must not contain.

Decides which entries are a fault of ours, whatever was done to the node: a broken invariant, a traceback, an
error, anything on stderr that is no entry. Read once, after the run. A killed process may leave half a line.
"""

import json
from collections.abc import Iterator

from chaos_parts.nodes import Life

FAULTS = frozenset({"invariant.violated", "node.failed", "compute.failed"})
SHOWN_CHARACTERS = 300


def bad_lines(life: Life) -> Iterator[str]:
    """Faults in the log of one life, each with the name of the node."""
    where = f"{life.node} node {life.number}"
    lines = life.log_path.read_text(encoding="utf-8", errors="replace").split("\n")
    for line in lines[:-1]:
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            yield f"{where} wrote {line[:SHOWN_CHARACTERS]!r}"
        elif entry.get("event") in FAULTS or entry.get("level") == "error":
            yield f"{where}: {line[:SHOWN_CHARACTERS]}"
