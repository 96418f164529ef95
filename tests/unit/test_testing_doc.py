"""docs/testing.md names tests that exist, and gives every fault of its table an answer."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
NAMED = re.compile(r"(tests/[\w/.]+)::(\w+)")
ROW = re.compile(r"^\| (K\d+\.\d+\w?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
ANSWERS = ("tests/", "cannot happen: ", "not yet: ")
WORDS_MAX = 12


@cache
def functions_of(path: str) -> set[str]:
    """Names of the functions that a module defines, empty when there is no such module."""
    module = ROOT / path
    if not module.is_file():
        return set()
    nodes = ast.parse(module.read_text(encoding="utf-8")).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_page_names_exists() -> None:
    named = NAMED.findall(PAGE)
    assert len(named) > 100
    missing = [f"{path}::{name}" for path, name in named if name not in functions_of(path)]
    assert missing == []
    assert [name for _, name in named if not name.startswith("test_")] == []


def test_every_fault_stands_once_with_an_answer() -> None:
    rows = ROW.findall(PAGE)
    identifiers = [identifier for identifier, _, _ in rows]
    assert len(rows) > 90
    assert len(rows) == len(re.findall(r"^\| K\d", PAGE, re.MULTILINE)), "a row is not read"
    assert len(set(identifiers)) == len(identifiers)
    assert [identifier for identifier, _, here in rows if not any(word in here for word in ANSWERS)] == []
    assert [words for _, words, _ in rows if len(words.split()) > WORDS_MAX] == []
