"""Which combinations of worker, local prefill, lanes and prefetch make sense.

Decides whether a decode node's route can work at all, from facts known before any model is loaded. Called by
the configuration (usage error) and by the scheduler's constructor (ValueError), so that neither door lets a
route in that the other refuses. It must never load an engine or need a validation library.
"""

from collections.abc import Sequence

from common.engines.registry import BACKENDS


def check_prefetch_route(
    *,
    prefill_workers: Sequence[str],
    remote_only: bool,
    backend: str,
    slots: int,
    prefetch_depth: int,
    on_prefill_failure: str,
) -> None:
    """Raise ValueError, saying what would be right, unless the route can work. `prefetch_depth` 0 is off."""
    _check_lanes(backend, slots)
    if remote_only and not prefill_workers:
        raise ValueError(
            "--pd-remote-only forbids local prefill, so something else has to compute prompts: "
            "add --pd-prefill-worker ENDPOINT"
        )
    if remote_only and on_prefill_failure == "local":
        raise ValueError(
            "--pd-remote-only forbids the local prefill that --on-prefill-failure local asks for: "
            "leave one of them out"
        )
    if not remote_only and not BACKENDS[backend].local_prefill:
        raise ValueError(
            f"backend {backend} cannot prefill locally: add --pd-remote-only and --pd-prefill-worker ENDPOINT"
        )
    _check_prefetch(prefill_workers, remote_only, prefetch_depth)


def _check_lanes(backend: str, slots: int) -> None:
    facts = BACKENDS.get(backend)
    decoding = ", ".join(name for name, known in BACKENDS.items() if known.lanes_max)
    if facts is None:
        raise ValueError(f"there is no backend {backend!r}: use one of {decoding}")
    if not facts.lanes_max:
        raise ValueError(f"backend {backend} cannot decode: use one of {decoding}")
    if not 1 <= slots <= facts.lanes_max:
        count = "1 request" if facts.lanes_max == 1 else f"{facts.lanes_max} requests"
        raise ValueError(
            f"--slots {slots}: backend {backend} decodes {count} at once: use 1"
            + (f" to {facts.lanes_max}" if facts.lanes_max > 1 else "")
        )


def _check_prefetch(prefill_workers: Sequence[str], remote_only: bool, prefetch_depth: int) -> None:
    if prefetch_depth == 0:
        return
    if prefetch_depth < 0:
        raise ValueError(
            f"--pd-prefetch-next {prefetch_depth}: the depth is at least 1; leave it out for none"
        )
    if not prefill_workers:
        raise ValueError(
            "--pd-prefetch-next needs a prefill node to prefetch from: add --pd-prefill-worker ENDPOINT"
        )
    if not remote_only:
        raise ValueError("--pd-prefetch-next needs a route without local prefill: add --pd-remote-only")
