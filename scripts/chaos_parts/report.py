"""How a run is shown: a line while it runs, a report at its end.

Decides what a person sees; the figures of `--json` are the same. It must never judge: that is the audit's.
"""

from collections import Counter
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from chaos_parts.audit import Evidence, Line
from chaos_parts.run import ChaosRun
from common.clock import now_ms

_REFRESH_MS = 250


class Progress:
    """Keeps the line of a terminal up to date; called far more often than that is needed."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._next_ms = 0

    def __call__(self, run: ChaosRun) -> None:
        if now_ms() >= self._next_ms:
            self._next_ms = now_ms() + _REFRESH_MS
            self._status.update(progress(run))


def progress(run: ChaosRun) -> str:
    """One line about a run that goes on."""
    jobs = [job for client in run.load for job in list(client.jobs)]
    ended = sum(bool(job.answers) for job in jobs)
    lives = " ".join(f"{node.name} {len(node.lives)}" for node in run.nodes)
    seconds = "" if run.started_ms is None else f" {(now_ms() - run.started_ms) / 1_000:.0f} s,"
    disturbances = sum(run.counts.values())
    return f"{run.phase}:{seconds} {disturbances} disturbances, lives {lives}, jobs {ended}/{len(jobs)}"


def figures(run: ChaosRun, evidence: Evidence, lines: list[Line]) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "ok": all(line.holds is not False for line in lines),
        "backend": run.scenario.kind,
        "seed": run.seed,
        "seconds": run.seconds,
        "disturbances": run.counts,
        "lives": dict(Counter(life.node for life in evidence.lives)),
        "jobs": dict(Counter(job.outcome for job in evidence.jobs).most_common()),
        "tokens": sum(len(job.token_ids) for job in evidence.jobs),
        "quiet_ms": evidence.quiet_ms,
        "audit": [{"name": line.name, "holds": line.holds, "detail": line.detail} for line in lines],
    }


def show(result: dict[str, Any], console: Console) -> None:
    """The report."""
    for title, key in (("Disturbances", "disturbances"), ("Jobs by outcome", "jobs")):
        table = Table(title=f"{title}: {sum(result[key].values())}", show_header=False, title_justify="left")
        table.add_column()
        table.add_column(justify="right")
        for name, number in result[key].items():
            table.add_row(name, str(number))
        console.print(table)
    table = Table(title="Audit", show_header=False, title_justify="left")
    marks = {True: ("holds", "green"), None: ("not measured", "yellow"), False: ("BROKEN", "bold red")}
    for line in result["audit"]:
        table.add_row(Text(*marks[line["holds"]]), line["name"], Text(line["detail"]))
    console.print(table)
