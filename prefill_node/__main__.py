"""`python -m prefill_node`: the prefill daemon's entry.

Decides nothing: it reads the command line before anything heavy is imported, so that a usage error is
instant, then hands over to `transport.daemon.Daemon`. Exit statuses: `common.errors.ExitStatus`.
"""

import sys

from common.command_line import parse
from common.prefill_config import PrefillConfig
from common.version import VERSION


def main() -> int:
    """Run the daemon; its exit status."""
    config = parse(PrefillConfig, sys.argv[1:], VERSION)
    from common.ids import new_incarnation
    from common.log import NodeLog
    from common.log_events import LogEvent
    from prefill_node.node import PrefillNode
    from transport.daemon import Daemon

    incarnation = new_incarnation()
    log = NodeLog(node="prefill", incarnation=incarnation, level=config.log_level, form=config.log_form)
    log.info(LogEvent.NODE_CONFIGURED, **config.model_dump(), origins=config.origins)
    return Daemon(PrefillNode(config, log, incarnation), log, config).run()


if __name__ == "__main__":
    sys.exit(main())
