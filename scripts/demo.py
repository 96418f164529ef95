#!/usr/bin/env python
"""Show what prefetch does: the same prompts with it off and on, side by side, on two nodes on this machine.

Decides the prompts, what is measured and how it is shown. Three runs: prefetch off, prefetch on, and a single
process (a decode node without a prefill node, which computes the prompts itself). All three must yield the
same tokens; a difference makes the exit status 1. scripts/demo.sh prepares the environment and the model.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from common.errors import ExitStatus, TandemError
from common.messages import Finished
from transport.client import Client
from transport.launch.batch import Batch, BatchJob, Outcome
from transport.launch.flow_shop import makespan, plain_sum
from transport.launch.pair import Pair
from transport.launch.pair_plan import PairPlan
from transport.launch.timeline import draw, letter, rows_of

PROMPTS = Path(__file__).with_name("demo_prompts.jsonl")
ANSWER_TOKENS = 24
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")
# So slow that the bars can be seen, and so fast that nobody waits.
EMULATED = ("--emulated-prefill-tokens-per-s", "40000"), ("--emulated-decode-ms", "2")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of all prompts. imports, local_tokens: by the decode node's count."""

    name: str
    outcomes: list[Outcome]
    wall_s: float
    imports: int
    local_tokens: int
    model: str

    @property
    def tokens(self) -> list[list[int]]:
        return [outcome.token_ids for outcome in self.outcomes]

    @property
    def busy_s(self) -> tuple[list[float], list[float]]:
        """Busy seconds of prefill and of decode, job by job."""
        timings = [outcome.answer.timings for outcome in self.outcomes]
        return [item.prefill_busy_us / 1e6 for item in timings], [
            item.decode_busy_us / 1e6 for item in timings
        ]

    def figures(self) -> dict[str, float]:
        count = sum(len(ids) for ids in self.tokens)
        return {"wall_s": self.wall_s, "output_tokens": count, "tokens_per_s": count / self.wall_s}


class Demo:
    """The runs and how they are shown."""

    def __init__(self, console: Console, plan: PairPlan, jobs: list[BatchJob]) -> None:
        self._console = console
        self._plan = plan
        self._jobs = jobs

    def run(self, name: str, plan: PairPlan) -> Run:
        """All prompts on freshly started nodes. Raises TandemError when a job or a node fails."""
        with self._bar() as bar, Pair(plan) as pair:
            task = bar.add_task(f"{name}: starting", total=None)
            pair.wait_ready()
            with Client(pair.decode_endpoint) as client:
                bar.update(task, description=f"{name}: warming up")
                self._finish(client, self._jobs[:1], lambda outcome: None)
                before = client.status()["counters"]
                bar.reset(task, description=name, total=len(self._jobs))
                outcomes = self._finish(client, self._jobs, lambda outcome: bar.advance(task))
                status = client.status()
            grown = {key: status["counters"][key] - before[key] for key in before}
            bar.update(task, description=f"{name}: stopping")
        wall_s = max(outcome.end_ms for outcome in outcomes) / 1_000
        run = Run(
            name, outcomes, wall_s, grown["remote_imports"], grown["local_prefill_tokens"], status["model"]
        )
        self._console.print(f"[green]✓[/] {name}: {wall_s:.1f} s for {len(outcomes)} prompts")
        return run

    def _finish(
        self, client: Client, jobs: list[BatchJob], on_end: Callable[[Outcome], None]
    ) -> list[Outcome]:
        outcomes = Batch(client, jobs, concurrency=len(jobs), on_end=on_end).run()
        for outcome in outcomes:
            if not isinstance(outcome.answer, Finished):
                code, detail = outcome.answer.code, outcome.answer.detail
                raise TandemError(f"prompt {outcome.job.label}: {code}: {detail}; {code.advice}")
        return outcomes

    @contextmanager
    def _bar(self) -> Iterator[Progress]:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(
            *columns,
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        ) as bar:
            yield bar

    def show_answers(self, run: Run) -> None:
        """What the model said, with each prompt's question."""
        table = Table(show_header=False, box=None, padding=(0, 1, 1, 0))
        for job, outcome in enumerate(run.outcomes):
            question = outcome.job.messages[0]["content"].splitlines()[-1]
            cut = " ..." if outcome.answer.reason == "length" else ""
            cell = Text.assemble((question, "bold"), "\n", outcome.text.strip() + cut)
            table.add_row(Text(f" {letter(job)} ", style=_style(job)), cell)
        self._console.print("\n[bold]Answers[/]\n", table)

    def show_timeline(self, runs: list[Run]) -> None:
        """Both nodes, run by run, on one scale."""
        width = max(20, min(self._console.width - 12, 120))
        span_ms = max(run.wall_s for run in runs) * 1_000
        self._console.print(f"[bold]Who worked when[/] ({span_ms / width:.0f} ms per character)\n")
        for run in runs:
            rows = rows_of([(outcome.answer.timings, outcome.end_ms) for outcome in run.outcomes])
            self._console.print(f"{run.name}, {run.wall_s:.1f} s", style="bold")
            for node, intervals in (("prefill", rows.prefill), ("decode", rows.decode)):
                line = Text(f"  {node:8}")
                for character in draw(intervals, span_ms, width):
                    line.append(
                        character, _style(ord(character) - ord("A")) if character.isalpha() else "dim"
                    )
                self._console.print(line, no_wrap=True, crop=True)
            self._console.print()

    def show_figures(self, result: dict[str, Any]) -> None:
        """The speed-up beside its bound, and whether the tokens agree."""
        off, on = result["prefetch_off"], result["prefetch_on"]
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_row("prefetch off", f"{off['wall_s']:.2f} s", f"{off['tokens_per_s']:.1f} tokens/s")
        table.add_row("prefetch on", f"{on['wall_s']:.2f} s", f"{on['tokens_per_s']:.1f} tokens/s")
        bound = f"of at most {result['ideal_speedup']:.2f}x"
        table.add_row("speed-up", f"[bold]{result['speedup']:.2f}x[/]", bound)
        efficiency = f"{100 * result['overlap_efficiency']:.1f} %"
        table.add_row("overlap efficiency", efficiency, "of what the busy times allow")
        equal = "[green]equal[/]" if result["tokens_equal"] else "[red]DIFFERENT[/]"
        table.add_row("tokens", equal, "off, on and single process (no prefill node)")
        self._console.print(table)


def _style(job: int) -> str:
    return f"black on {COLOURS[job % len(COLOURS)]}"


def summary(off: Run, on: Run, single: Run) -> dict[str, Any]:
    """What --json writes. The bound is the blocking flow shop's with one source slot."""
    ideal = plain_sum(*off.busy_s) / makespan(*off.busy_s, slots=1)
    return {
        "model": on.model,
        "jobs": len(on.outcomes),
        "prefetch_off": off.figures(),
        "prefetch_on": on.figures(),
        "speedup": off.wall_s / on.wall_s,
        "ideal_speedup": ideal,
        "overlap_efficiency": makespan(*on.busy_s, slots=1) / on.wall_s,
        "tokens_equal": off.tokens == on.tokens == single.tokens,
        "remote_imports": off.imports + on.imports,
        "local_prefill_tokens": off.local_tokens + on.local_tokens,
        "answers": [
            {"prompt": outcome.job.messages[0]["content"], "text": outcome.text} for outcome in on.outcomes
        ],
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run prompts with prefetch off and on.", allow_abbrev=False)
    parser.add_argument("--model", help="name or path of the model (default: the daemons')")
    parser.add_argument("--emulated", action="store_true", help="no model: emulated nodes, in seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and answers there")
    return parser.parse_args()


def read_jobs() -> list[BatchJob]:
    """The prompts, as chats, sampled greedily so that runs can be compared."""
    entries = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    return [
        BatchJob(
            entry["label"],
            messages=[{"role": "user", "content": entry["prompt"]}],
            sampling={"max_tokens": ANSWER_TOKENS, "temperature": 0.0},
        )
        for entry in entries
    ]


def main() -> int:
    """Exit status 0 when all tokens agree, 1 when not or when a node failed, 6 when interrupted."""
    given = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(highlight=False)
    plan = PairPlan(model=given.model)
    if given.emulated:
        prefill_speed, decode_speed = EMULATED
        plan = PairPlan(
            kind="emulated",
            prefill_extra=prefill_speed,
            decode_extra=(*decode_speed, *prefill_speed),
        )
    demo = Demo(console, plan, read_jobs())
    try:
        off = demo.run("prefetch off", replace(plan, prefetch_depth=0))
        on = demo.run("prefetch on", plan)
        single = demo.run("single process", replace(plan, alone=True))
        result = summary(off, on, single)
        if given.json is not None:
            given.json.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except (TandemError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; both nodes have ended", file=sys.stderr)
        return ExitStatus.ABORTED
    demo.show_answers(on)
    demo.show_timeline([off, on])
    demo.show_figures(result)
    return 0 if result["tokens_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
