"""Random names.

Decides how identities look; called by the wiring of both nodes, the client and the session layer, which
hand the draw to the pure cores as an argument. It must never be called inside a core: a core that draws its
own names cannot be replayed.
"""

import secrets
import uuid


def new_incarnation() -> str:
    """Name one process start (16 hex digits)."""
    return secrets.token_hex(8)


def new_session_id() -> str:
    """Name one session (16 hex digits); drawn by the binding side only."""
    return secrets.token_hex(8)


def new_job_id() -> str:
    """Name one job (a uuid4 as 32 hex digits); drawn by the decode node only."""
    return uuid.uuid4().hex
