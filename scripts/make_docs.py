"""Write the tables of docs/ that come from code.

Decides how tables look; run by hand after a change (`python scripts/make_docs.py`), and by a test with
`--check`, which fails when a page is stale. A table stands between `<!-- generated: NAME -->` and
`<!-- end -->`; everything else on a page is written by people and left alone.
"""

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.command_line import variable_of  # noqa: E402
from common.config import Flag, NodeConfig, flag_of  # noqa: E402
from common.decode_config import DecodeConfig  # noqa: E402
from common.errors import ErrorCode, ExitStatus  # noqa: E402
from common.lifecycle import (  # noqa: E402
    JOB_TRANSITIONS,
    LANE_TRANSITIONS,
    SLOT_TRANSITIONS,
    SOURCE_TRANSITIONS,
)
from common.log_events import LogEvent  # noqa: E402
from common.messages import MESSAGE_TYPES  # noqa: E402
from common.prefill_config import PrefillConfig  # noqa: E402

PAGES = ("protocol.md", "operations.md")
_MARK = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.S)


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table."""
    columns = list(head)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _messages() -> str:
    rows = []
    for number, cls in MESSAGE_TYPES.items():
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).upper()
        fields = ", ".join(f"`{field}`" for field in cls.__dataclass_fields__)
        rows.append((number, name, fields or "none", cls.__doc__.split("\n")[0].rstrip(".")))
    return table(("type", "message", "fields", "meaning"), rows)


def _transitions(transitions: dict[Any, Any]) -> str:
    rows = [(state, event, following) for (state, event), following in transitions.items()]
    return table(("state", "event", "next"), rows)


def _errors() -> str:
    rows = [(f"`{code}`", "yes" if code.definite else "no", code.advice) for code in ErrorCode]
    return table(("code", "definite", "what to do"), rows)


def _exits() -> str:
    return table(("status", "name"), [(int(status), status.name) for status in ExitStatus])


def _log_events() -> str:
    return "\n".join(f"- `{event}`" for event in LogEvent) + "\n"


def _flags(config_class: type[NodeConfig]) -> str:
    rows = []
    for name, field in config_class.model_fields.items():
        look = next((item for item in field.metadata if isinstance(item, Flag)), None)
        unset = "none" if look is None else look.unset
        default = unset if field.default in (None, ()) else field.default
        default = "off" if default is False else default
        rows.append((f"`{flag_of(name)}`", f"`{variable_of(name)}`", default, field.description))
    return table(("flag", "environment", "default", "meaning"), rows)


def _config_example() -> str:
    text = (ROOT / "docs" / "pair.toml").read_text(encoding="utf-8")
    return f"```toml\n{text}```\n"


def tables() -> dict[str, str]:
    """Every generated table by name, and the example of a configuration file."""
    return {
        "messages": _messages(),
        "slot-table": _transitions(SLOT_TRANSITIONS),
        "source-table": _transitions(SOURCE_TRANSITIONS),
        "lane-table": _transitions(LANE_TRANSITIONS),
        "job-table": _transitions(JOB_TRANSITIONS),
        "errors": _errors(),
        "exit-statuses": _exits(),
        "log-events": _log_events(),
        "prefill-flags": _flags(PrefillConfig),
        "decode-flags": _flags(DecodeConfig),
        "config-example": _config_example(),
    }


def main() -> int:
    """Write the pages, or say which are stale."""
    parser = argparse.ArgumentParser(description="Write the generated tables of docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is stale")
    check = parser.parse_args().check
    made = tables()
    stale = []
    for page in PAGES:
        path = ROOT / "docs" / page
        text = path.read_text()
        fresh = _MARK.sub(lambda found: found[1] + made[found[2]] + found[3], text)
        if fresh != text:
            stale.append(page)
            if not check:
                path.write_text(fresh)
    if check and stale:
        print(f"stale: {', '.join(stale)}; run python scripts/make_docs.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
