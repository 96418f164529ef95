"""`python -m decode_node.gateway`: the gateway's entry.

Decides nothing: it reads the command line, the keys and binds before anything heavy is imported, so that a
usage error is instant, then hands over to `decode_node.gateway.server`. Exit statuses:
`common.errors.ExitStatus`.
"""

import sys

from common.errors import ConfigError, ExitStatus
from decode_node.gateway.api_keys import read_api_keys
from decode_node.gateway.listening import listen
from decode_node.gateway.options import parse


def main() -> int:
    """Run the gateway; its exit status."""
    options = parse(sys.argv[1:])
    try:
        api_keys = () if options.api_key_file is None else read_api_keys(options.api_key_file)
        keys = None
        if options.key_file is not None:
            from transport.key_files import connecting_keys

            keys = connecting_keys(options.key_file, options.server_key)
        bound = listen(options.host, options.port)
    except ConfigError as error:
        sys.stderr.write(f"python -m decode_node.gateway: error: {error}\n")
        return ExitStatus.CONFIG
    from decode_node.gateway.server import Gateway

    return Gateway(options, bound, api_keys, keys).run()


if __name__ == "__main__":
    sys.exit(main())
