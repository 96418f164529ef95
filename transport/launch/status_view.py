"""How STATUS of both nodes looks in a terminal.

Decides what stands where, in which words, and what a person needs beside the bare values: how long ago the
last progress was, and what will end an orphan. Called by `scripts/status.py` with the plain values that the
nodes answered. It must never need a key: what is missing is left out, and what it does not know is shown
under its own name, so that a newer node can be watched as well.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

Values = Mapping[str, Any]

_IN_THE_HEAD = (
    "role",
    "ready",
    "accepting",
    "draining",
    "idle",
    "incarnation",
    "model",
    "progress",
    "progress_age_ms",
)
_ONLY_IF_TRUE = ("draining", "misfit", "suspected")
_IDS = ("job", "session", "decode_sessions", "incarnation")
_COLUMNS = ("slot", "lane", "session", "role", "state", "job", "epoch", "age_ms", "cause", "ends_by")
_NUMBERS = frozenset({"slot", "lane", "epoch", "age_ms"})
_NAMED_BY_THEIR_COLUMNS = ("lanes", "slots")
_WORDS = {"age_ms": "age", "ends_by": "what ends it", "worker": "prefill node", "workers": "prefill node"}
_STYLES = {
    "free": "dim",
    "idle": "dim",
    "pool": "dim",
    "orphaned": "bold red",
    "abandoned": "bold red",
    "ready": "green",
    "held": "green",
}
_NAME_OF_A_ROW = "worker"
_AT_REST = ("free", "idle", "pool")
_ROWS_MAX = 12
_ID_CHARACTERS = 8


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node as it was last seen.

    endpoint: where it was asked. status: its answer, None when there was none. problem: why there was none.
    """

    name: str
    endpoint: str
    status: Values | None
    problem: str = ""


def render(views: Sequence[NodeView]) -> RenderableType:
    """All nodes, one below the other."""
    parts: list[RenderableType] = []
    for view in views:
        parts += [*_node(view), ""]
    return Group(*parts[:-1])


def duration(milliseconds: float) -> str:
    """A span of time in a form as short as its use: `950 ms`, `12.3 s`, `4 min 5 s`, `3 h 2 min`."""
    if milliseconds < 1_000:
        return f"{milliseconds:.0f} ms"
    seconds = milliseconds / 1_000
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _node(view: NodeView) -> Iterator[RenderableType]:
    title = Text.assemble((f"{view.name} node", "bold"), "  ", (view.endpoint, "cyan"))
    if view.status is not None:
        title.append("  ")
        title.append_text(_condition(view.status))
    yield title
    if view.problem:
        yield _indented(Text(view.problem, style="bold red"))
    if view.status is None:
        return
    if identity := _identity(view.status):
        yield _indented(_Facts(identity))
    yield from _body(view.status, _IN_THE_HEAD)


def _condition(status: Values) -> Text:
    """Ready or not, in words and colours."""
    words: list[tuple[str, str]] = []
    for key, no, style in (("ready", "not ready", "bold red"), ("accepting", "not accepting", "bold red")):
        if key in status:
            words.append((key, "green") if status[key] else (no, style))
    words += [
        (key, "yellow" if key == "draining" else "dim") for key in ("draining", "idle") if status.get(key)
    ]
    return Text(", ").join(Text(word, style=style) for word, style in words)


def _identity(status: Values) -> Values:
    """progress_age_ms is None while nothing is owed; an age belongs beside the count."""
    facts = {key: status[key] for key in ("model", "progress") if key in status}
    if status.get("progress_age_ms") is not None:
        facts["last_progress"] = f"{duration(status['progress_age_ms'])} ago"
    return facts | {key: status[key] for key in ("incarnation",) if key in status}


def _body(values: Values, shown: Sequence[str] = ()) -> Iterator[RenderableType]:
    """Facts on as few lines as they need, then tables, then nested parts, each under its name."""
    rest = {key: value for key, value in values.items() if key not in shown and _says_something(key, value)}
    tables = {key: value for key, value in rest.items() if _is_table(value)}
    groups = {key: value for key, value in rest.items() if isinstance(value, Mapping)}
    facts = {key: value for key, value in rest.items() if key not in tables and key not in groups}
    if facts:
        yield _indented(_Facts(facts))
    for key, rows in tables.items():
        yield from (_indented(part) for part in _rows(key, rows))
    for key, group in groups.items():
        if any(isinstance(value, (Mapping, list, tuple)) for value in group.values()):
            yield _indented(Text(_words(key), style="bold"))
            yield _indented(Group(*_body(group)))
        else:
            # What has not happened is many words and no news.
            happened = {name: value for name, value in group.items() if value}
            if happened:
                yield _indented(_Facts(happened, _words(key)))


def _says_something(key: str, value: Any) -> bool:
    empty = value is None or (isinstance(value, (str, Mapping, list, tuple)) and not value)
    return not empty and not (key in _ONLY_IF_TRUE and value is False)


def _is_table(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(row, Mapping) for row in value)


def _rows(name: str, rows: Sequence[Values]) -> Iterator[RenderableType]:
    """A table; or, where a row has parts of its own, as a prefill node has, one paragraph for each."""
    if any(isinstance(value, (Mapping, list, tuple)) for row in rows for value in row.values()):
        for row in rows:
            yield Text.assemble((_words(name), "bold"), "  ", (str(row.get(_NAME_OF_A_ROW, "")), "cyan"))
            yield from _body(row, (_NAME_OF_A_ROW,))
        return
    rows = sorted(rows, key=lambda row: row.get("state") in _AT_REST)
    shown, more = rows[:_ROWS_MAX], len(rows) - _ROWS_MAX
    if name == "sessions":
        yield _Facts(map(_session, shown), f"sessions ({len(rows)})" if more > 0 else "sessions")
        return
    if name not in _NAMED_BY_THEIR_COLUMNS:
        yield Text(_words(name), style="bold")
    yield _table(shown)
    if more > 0:
        yield Text(f"and {more} more, {_words(name)} at rest last", style="dim")
    yield from (_orphan(row) for row in shown if row.get("state") == "orphaned")


def _session(row: Values) -> tuple[str, str]:
    silent = f" silent {duration(row['silent_ms'])}" if "silent_ms" in row else ""
    return str(row.get("role", "")), f"{_short(str(row.get('session', '')))}{silent}"


def _table(rows: Sequence[Values]) -> Table:
    """One line per row. Why a slot is orphaned, and what ends that, is told below."""
    told = [row | {"cause": "", "ends_by": ""} if row.get("state") == "orphaned" else row for row in rows]
    names = [*_COLUMNS, *sorted({column for row in rows for column in row} - set(_COLUMNS))]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    used = [name for name in names if any(_says_something(name, row.get(name)) for row in told)]
    for name in used:
        number = name in _NUMBERS
        table.add_column(
            _words(name), justify="right" if number else "left", no_wrap=number or name == "state"
        )
    for row in told:
        table.add_row(*(_cell(name, row.get(name)) for name in used))
    return table


def _cell(column: str, value: Any) -> Text:
    if not _says_something(column, value):
        return Text("-" if column == "job" else "", style="dim")
    return Text(_shown(column, value), style=_STYLES.get(str(value), "") if column == "state" else "")


def _orphan(row: Values) -> Text:
    """What a person wants to know of a slot whose job has left it."""
    age = f" {duration(row['age_ms'])} ago" if "age_ms" in row else ""
    cause = f": {row['cause']}" if row.get("cause") else ""
    ends_by = f"; ends by {row['ends_by']}" if row.get("ends_by") else ""
    return Text(f"slot {row.get('slot')}: orphaned{age}{cause}{ends_by}", style="red")


class _Facts:
    """Names and values, as many on a line as fit."""

    def __init__(self, facts: Values | Iterable[tuple[str, str]], heading: str = "") -> None:
        """facts: by their keys, or as they are shown."""
        self._heading = heading
        if isinstance(facts, Mapping):
            facts = [(_words(key.removesuffix("_ms")), _shown(key, value)) for key, value in facts.items()]
        self._facts = [Text.assemble((name, "dim"), " ", value) for name, value in facts]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text(self._heading, style="bold")
        for fact in self._facts:
            if line and len(line) + 2 + len(fact) > options.max_width:
                yield line
                line = Text("  " if self._heading else "")
                line.append_text(fact)
            else:
                line = Text.assemble(line, "  " if line else "", fact)
        yield line


def _words(key: str) -> str:
    return _WORDS.get(key, key.replace("_", " "))


def _shown(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("_ms") and isinstance(value, (int, float)):
        return duration(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(_shown(key, item) for item in value)
    return _short(str(value)) if key in _IDS else str(value)


def _short(identity: str) -> str:
    """The head of a random id: enough to tell it from the few others, and to search the log for."""
    return identity[:_ID_CHARACTERS]


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 2), expand=False)
