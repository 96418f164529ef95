"""A client in a process of its own, which the run kills, stops or leaves alone.

Decides nothing: it reads from its first argument where to connect and which jobs to send, writes one line of
JSON for each message that it gets, and ends with status 0 when every job has its answer. It must never be
imported; the run starts it as a program.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from chaos_parts.jobs import described
from common.errors import NodeUnavailable
from transport.client import Client
from transport.peers import LivenessTimes


def main() -> int:
    """Run the jobs; 1 when no node answers."""
    given = json.loads(sys.argv[1])
    try:
        client = Client(given["endpoint"], given["connect_ms"], LivenessTimes(*given["times"]))
    except NodeUnavailable:
        return 1
    session = client.hello.session
    tell("session", session=session, incarnation=client.hello.incarnation)
    with client:
        for label, job in given["jobs"].items():
            if client.hello is None:
                break
            tell("sent", label=label)
            client.submit(label, **job)
        live = True
        while live:
            live = bool(client.live)
            for message in client.events(1_000 if live else 0):
                lost = client.hello is None or client.hello.session != session
                kind, fields = described(message, lost)
                tell("got", label=getattr(message, "label", ""), kind=kind, fields=fields)
    return 0


def tell(what: str, **fields: object) -> None:
    print(json.dumps({"what": what, **fields}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
