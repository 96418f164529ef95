#!/usr/bin/env python
"""Kill, stop and mislead a running pair under load, then audit what became of every job and every slot.

Decides the arguments and the exit status; the machinery is in scripts/chaos_parts: `schedule` draws what is
done, `nodes`, `relay`, `strangers` and `short_clients` do it, `load` and `watch` look on, `audit` judges.
Exit status 0 only if everything holds. Nothing is left behind, also after Ctrl-C.
"""

import argparse
import json
import signal
import sys
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from chaos_parts import report
from chaos_parts.audit import audit
from chaos_parts.run import ChaosRun
from chaos_parts.scenario import SCENARIOS
from rich.console import Console

from common.errors import ConfigError, ExitStatus, TandemError

EPILOG = """\
what is done, side by side and in an order that follows from --seed alone:
  nodes     SIGKILL and restart on the same endpoint, SIGTERM drain and restart, SIGSTOP for less than
            suspect, more than dead_after, more than the lease; restarts in the first six tenths of the
            time only, so that memory can be watched in the rest
  wire      messages between the nodes dropped, repeated, swapped, altered, cut, replayed, delayed; the
            connection closed and reset
  strangers random and mutated frames at both doors, sessions that break the rules, a rival decode node
  clients   processes that are killed or stopped in the middle of their jobs

exit status: 0 all holds; 1 something does not, or a node did not start; 2 no place to run; 6 interrupted
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Disturb a running pair under load, then audit it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--seconds", type=int, default=60, metavar="N", help="how long to disturb it (60)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which schedule (0)")
    parser.add_argument("--backend", choices=list(SCENARIOS), default="emulated", help="(emulated)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    given = parser.parse_args()
    if given.seconds < 1:
        parser.error("--seconds must be at least 1")
    return given


class Interruption:
    """Remembers a signal until the run asks: one in the middle of a start would leave a process behind."""

    def __init__(self) -> None:
        self._arrived = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._arrived = True

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was one."""
        if self._arrived:
            raise KeyboardInterrupt


def main() -> int:
    """Run, audit, show."""
    given = parse_arguments()
    interruption = Interruption()
    console = Console(stderr=given.json, highlight=False)
    keep_logs = True
    with console.status("starting") as status:
        show_progress = report.Progress(status)

        def tick(run: ChaosRun) -> None:
            interruption.check()
            show_progress(run)

        try:
            run = ChaosRun(SCENARIOS[given.backend], given.seed, given.seconds, tick)
        except ConfigError as error:
            print(f"chaos: {error}", file=sys.stderr)
            return ExitStatus.CONFIG
        try:
            evidence = run.execute()
            lines = audit(evidence)
            keep_logs = any(line.holds is False for line in lines)
        except TandemError as error:
            print(f"chaos: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            keep_logs = False
            print("chaos: interrupted; everything has ended", file=sys.stderr)
            return ExitStatus.ABORTED
        finally:
            run.close(keep_logs)
    result = report.figures(run, evidence, lines)
    if keep_logs:
        print(f"chaos: logs: {run.directory}", file=sys.stderr)
    if given.json:
        print(json.dumps(result))
    else:
        report.show(result, console)
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
