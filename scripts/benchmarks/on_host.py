"""A daemon that runs on a test host: `python -m scripts.benchmarks.on_host NAMESPACE PROGRAM FLAGS...`.

Decides nothing: it becomes `ip netns exec`, which becomes the daemon, so that the process stays its
launcher's child. Started by `hosts.py` alone. Words before the namespace, which the launcher puts there, go
to the daemon.
"""

import os
import sys

MARK = "namespace:"


def main() -> None:
    """Never returns."""
    place = next(index for index, word in enumerate(sys.argv) if word.startswith(MARK))
    namespace, program = sys.argv[place].removeprefix(MARK), sys.argv[place + 1]
    flags = [*sys.argv[1:place], *sys.argv[place + 2 :]]
    os.execvp("ip", ["ip", "netns", "exec", namespace, sys.executable, "-m", program, *flags])


if __name__ == "__main__":
    main()
