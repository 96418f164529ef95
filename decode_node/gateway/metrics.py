"""The gateway's metrics, for Prometheus.

Decides the names: `tandem_gateway_*` is what the gateway itself saw, `tandem_decode_*` what its decode node's
STATUS says at the moment of the scrape. Counters are moved by whoever meets the event; labels never hold
anything that a client chose.
"""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from common.messages import Finished

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """All counters and histograms of one gateway."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.decode_status: dict[str, Any] | None = None
        own = {"registry": self.registry}
        self.requests = Counter(
            "tandem_gateway_http_requests", "HTTP requests answered", ("route", "status"), **own
        )
        self.in_flight = Gauge("tandem_gateway_jobs_in_flight", "jobs under way", **own)
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "from the request's arrival to its first token"
        )
        self.gap = self._histogram("inter_token_seconds", "between one batch of tokens and the next")
        self.stage = self._histogram(
            "stage_seconds", "stages of finished jobs, as the decode node timed them", ("stage",)
        )
        self.tokens = Counter("tandem_gateway_tokens", "tokens of finished jobs", ("kind",), **own)
        self.finished = Counter("tandem_gateway_jobs_finished", "jobs that finished", ("path",), **own)
        self.errors = Counter(
            "tandem_gateway_errors", "requests that got an error, by its code", ("code",), **own
        )
        self.disconnects = Counter(
            "tandem_gateway_disconnects", "clients that left before their answer's end", **own
        )
        self.cancelled = Counter("tandem_gateway_jobs_cancelled", "jobs cancelled by the gateway", **own)
        self.slow_readers = Counter(
            "tandem_gateway_slow_readers", "streams given up because their client did not read", **own
        )
        self.sessions_lost = Counter(
            "tandem_gateway_sessions_lost", "sessions with the decode node that ended", **own
        )
        self.connected = Gauge("tandem_gateway_connected", "1 with a session at the decode node", **own)
        self.registry.register(_DecodeStatus(self))

    def _histogram(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(f"tandem_gateway_{name}", text, labels, buckets=_SECONDS, registry=self.registry)

    def observe_end(self, end: Finished) -> None:
        """Account for a finished job."""
        for stage, duration_ms in end.timings.stages_ms.items():
            self.stage.labels(stage).observe(duration_ms / 1_000)
        self.finished.labels(end.path).inc()
        self.tokens.labels("prompt").inc(end.usage.prompt_tokens)
        self.tokens.labels("completion").inc(end.usage.completion_tokens)
        self.tokens.labels("cached_decode").inc(end.usage.cached_tokens_decode)
        self.tokens.labels("cached_prefill").inc(end.usage.cached_tokens_prefill)

    def page(self, decode_status: dict[str, Any] | None) -> bytes:
        """The text of a scrape; decode_status: None when the node did not answer."""
        self.decode_status = decode_status
        return generate_latest(self.registry)


class _DecodeStatus:
    """Turns a STATUS into metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Any]:
        status = self._metrics.decode_status
        up = GaugeMetricFamily("tandem_decode_up", "1 when the decode node answered this scrape")
        up.add_metric([], float(status is not None))
        yield up
        if status is None:
            return
        for name in ("ready", "accepting", "draining", "idle", "prefetch_depth", "clients"):
            yield GaugeMetricFamily(f"tandem_decode_{name}", f"{name} of STATUS", float(status[name]))
        yield _by_state("tandem_decode_jobs", "live jobs", status["jobs"])
        yield _by_state("tandem_decode_lanes", "lanes", _states(status["lanes"]))
        yield from self._workers(status["workers"])
        for name, count in status["counters"].items():
            yield CounterMetricFamily(f"tandem_decode_{name}", f"{name} of STATUS", count)
        for name, count in (status["prefix_cache"] or {}).items():
            yield GaugeMetricFamily(f"tandem_decode_prefix_cache_{name}", f"{name} of STATUS", count)

    @staticmethod
    def _workers(workers: list[dict[str, Any]]) -> Iterator[Any]:
        usable = GaugeMetricFamily(
            "tandem_decode_worker_usable", "1 when work may go there", labels=("worker",)
        )
        orphans = GaugeMetricFamily("tandem_decode_orphans", "reservations without job", labels=("worker",))
        survivors = GaugeMetricFamily(
            "tandem_decode_survivors", "KV of ended sessions that is still to be imported", labels=("worker",)
        )
        slots = GaugeMetricFamily("tandem_decode_slots", "granted slots by state", labels=("worker", "state"))
        counters: dict[str, CounterMetricFamily] = {}
        for worker in workers:
            name = [worker["worker"]]
            usable.add_metric(name, float(worker["usable"]))
            orphans.add_metric(name, worker["orphans"])
            survivors.add_metric(name, len(worker["survivors"]))
            for state, count in _states(worker["slots"]).items():
                slots.add_metric([*name, state], count)
            for counter, count in worker["counters"].items():
                family = counters.setdefault(
                    counter,
                    CounterMetricFamily(
                        f"tandem_decode_worker_{counter}", f"{counter} of STATUS", labels=("worker",)
                    ),
                )
                family.add_metric(name, count)
        yield from (usable, orphans, survivors, slots, *counters.values())


def _states(items: list[dict[str, Any]]) -> dict[str, int]:
    states = [item["state"] for item in items]
    return {state: states.count(state) for state in sorted(set(states))}


def _by_state(name: str, text: str, counts: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, f"{text} by state", labels=("state",))
    for state, count in counts.items():
        family.add_metric([state], count)
    return family
