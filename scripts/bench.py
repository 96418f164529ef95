"""Measure Tandem: `python scripts/bench.py SUBCOMMAND [--json]`; `--help` says what there is.

Decides nothing; each subcommand is a module of `scripts/benchmarks` with `configure(parser)` and
`measure(options, console)`, which shows a table and returns the figures. All comparisons are ratios of
medians within one run, because machines are noisy. Figures go to docs/performance.md by hand, with the
machine's name.
"""

import argparse
import json
import platform
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import (
    control,
    conversion,
    engine,
    gateway,
    import_copy,
    lanes,
    memory,
    overlap,
    prefix,
    robustness,
    scheduler,
    transfer,
    worth,
)
from rich.console import Console

from common.errors import TandemError

COMMANDS = {
    "overlap": (overlap, "prefetch off and on, one and four clients, against the flow-shop bound"),
    "control": (control, "PING round trip, and what idle daemons use"),
    "copy": (import_copy, "the import's copy and digest against a plain memory copy"),
    "conversion": (conversion, "each wire dtype: error of the next logits, equal tokens, bytes and speed"),
    "engine": (engine, "the torch engine against transformers' generate()"),
    "gateway": (gateway, "what the gateway adds to the first token, and its CPU time per token"),
    "lanes": (lanes, "decode throughput of several lanes against one, engine and daemons"),
    "scheduler": (scheduler, "CPU time of the nodes per token beside the engine's, 64 lanes, many jobs"),
    "transfer": (
        transfer,
        "KV over each data plane against what the machine can do; --hosts: two test hosts",
    ),
    "worth": (worth, "whether, and from which prompt length on, the prefill node pays"),
    "memory": (memory, "resident memory of both daemons over many jobs"),
    "prefix": (prefix, "a chat and a shared system prompt, with the prefix caches off and on"),
    "robustness": (robustness, "digests, sequence checks and ledger checks on against off"),
}


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = f"{names[0]} x {len(names)}" if names else model
    return {"cpu": model, "system": platform.platform(), "python": platform.python_version()}


def main() -> int:
    """Run one benchmark; print a table, or one JSON object with `--json`."""
    parser = argparse.ArgumentParser(description="Measure Tandem.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
        module.configure(command)
    options = parser.parse_args()
    console = Console(stderr=options.json)
    try:
        figures = COMMANDS[options.command][0].measure(options, console)
    except TandemError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if options.json:
        print(json.dumps({"benchmark": options.command, "machine": machine(), **figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
