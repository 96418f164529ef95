"""The documents agree with the code.

Decides nothing about prose: generated tables must be fresh, every invariant must be in the architecture, and
every relative link must lead somewhere. Run with the unit tests.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.log_events import LogEvent

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def test_generated_tables_are_fresh() -> None:
    run = subprocess.run(
        [sys.executable, "scripts/make_docs.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )

    assert (run.returncode, run.stdout) == (0, "")


def test_every_invariant_is_in_the_architecture() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()

    assert {f"INV-{number}" for number in range(1, 10)} <= set(re.findall(r"INV-\d", page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    targets = [
        target.split("#")[0]
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text())
        if not target.startswith(("http://", "https://", "#"))
    ]

    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_documented_log_event_is_written_somewhere() -> None:
    folders = ("common", "transport", "prefill_node", "decode_node")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    text = "".join(path.read_text() for path in sources if path.name != "log_events.py")

    assert [event.name for event in LogEvent if f"LogEvent.{event.name}" not in text] == []
