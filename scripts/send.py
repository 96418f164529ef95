#!/usr/bin/env python
"""Send prompts to a running decode node, and show the answers as they come.

Decides how jobs are written by a person (a prompt, or a file with one JSON object per line) and how answers
are shown. Without --endpoint it finds the pair that scripts/up.py runs. Exit status: 0 when every job
finished, 1 when one failed, 2 when the request was wrong, 6 when interrupted (its jobs are cancelled).
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from types import FrameType
from typing import Any

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from common.decode_config import DecodeConfig
    from common.endpoints import check_connect_endpoint
    from common.errors import ConfigError, ErrorCode, ExitStatus, NodeUnavailable, TandemError
    from common.limits import CONTROL_MESSAGE_BYTES, JOBS_PER_CLIENT
    from common.messages import Finished
    from common.sampling import SamplingParams
    from transport.client import REFUSED_TIMEOUT_MS, Client
    from transport.launch.batch import Batch, BatchJob, Choice, Outcome
    from transport.launch.key_flags import add_key_flags, keys_of
    from transport.launch.run_directory import only_running_pair
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is missing: run scripts/demo.sh once, then .venv/bin/python scripts/send.py")
except KeyboardInterrupt:
    sys.exit(6)

SAMPLING = tuple(field.name for field in fields(SamplingParams))
SOURCES = ("prompt", "messages", "prompt_ids")
MAX_TOKENS = 128
FILE_HELP = (
    "one job per line: a JSON object with prompt, messages or prompt_ids, and, if wanted, a label and "
    "sampling fields"
)
# What the rest of a message may take.
PROMPT_BYTES = CONTROL_MESSAGE_BYTES - 64 * 1024


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Send prompts to a running decode node.", allow_abbrev=False)
    add = parser.add_argument
    add("prompt", nargs="?", help="the prompt; - or nothing reads it from stdin")
    add("--file", type=Path, metavar="JOBS", help=FILE_HELP)
    add("--concurrency", type=int, default=8, metavar="N", help="jobs under way at once (default: 8)")
    add("--endpoint", help="the decode node (default: the pair that up.py runs)")
    add("--raw", action="store_true", help="send prompts as they are, without chat template")
    add("--json", action="store_true", help="one JSON object per job, with ids and timings")
    add_key_flags(parser)
    add_sampling_flags(parser.add_argument_group("sampling", "a job of --file may have its own").add_argument)
    given = parser.parse_args()
    if given.file is not None and given.prompt is not None:
        parser.error("give a prompt or --file, not both")
    if not 1 <= given.concurrency <= JOBS_PER_CLIENT:
        parser.error(f"--concurrency must be from 1 to {JOBS_PER_CLIENT}")
    if given.logit_bias is not None:
        biases = dict(given.logit_bias)
        if len(biases) < len(given.logit_bias):
            parser.error("--logit-bias: one bias for each token id")
        given.logit_bias = biases
    return given


def add_sampling_flags(add: Callable[..., Any]) -> None:
    """A flag for each field of `SamplingParams`; values are the node's to judge."""
    add(
        "--max-tokens",
        type=int,
        default=MAX_TOKENS,
        metavar="N",
        help=f"most new tokens (default: {MAX_TOKENS})",
    )
    add("--temperature", type=float, metavar="T", help="0 takes the likeliest token (default)")
    add("--top-p", type=float, metavar="P", help="draw from the likeliest tokens of this total probability")
    add("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    add("--min-p", type=float, metavar="P", help="leave out tokens this much less likely than the likeliest")
    add("--seed", type=int, help="for the same draw each time")
    add("--stop", action="append", metavar="TEXT", help="end the answer before this text; may be repeated")
    add(
        "--stop-token-id",
        action="append",
        type=int,
        dest="stop_token_ids",
        metavar="ID",
        help="may be repeated",
    )
    add("--ignore-eos", action="store_true", default=None, help="go on after the end-of-sequence token")
    add("--min-tokens", type=int, metavar="N", help="nothing ends the answer before N tokens")
    add("--presence-penalty", type=float, metavar="X", help="makes tokens that came less likely, once")
    add("--frequency-penalty", type=float, metavar="X", help="makes them less likely each time they came")
    add("--repetition-penalty", type=float, metavar="X", help="the same, the prompt's too; 1 is off")
    add(
        "--logit-bias",
        action="append",
        type=bias_of,
        metavar="ID=BIAS",
        help="make a token likelier, or less likely; may be repeated",
    )
    add("--logprobs", type=int, metavar="N", help="with --json: the probability of each token and N others")
    add("-n", type=int, metavar="N", help="this many answers to each prompt")


def bias_of(text: str) -> tuple[str, float]:
    """A --logit-bias. Raises ValueError."""
    token_id, _, bias = text.partition("=")
    return str(int(token_id)), float(bias)


def jobs_of(given: argparse.Namespace) -> list[BatchJob]:
    """What to send. Raises ConfigError that says where the fault is."""
    defaults = {name: getattr(given, name) for name in SAMPLING if getattr(given, name) is not None}
    if given.file is None:
        return [_job({"prompt": _prompt(given.prompt)}, "1", defaults, given.raw)]
    try:
        with given.file.open("rb") as file:
            lines = file.read().split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read {given.file}: {error.strerror}") from None
    jobs = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                jobs.append(_job(_object(line), str(number), defaults, given.raw))
            except ValueError as error:
                raise ConfigError(
                    f"{ErrorCode.INVALID_REQUEST}: {given.file}, line {number}: {error}; nothing was sent"
                ) from None
    if not jobs:
        raise ConfigError(f'{given.file} has no jobs; write one per line, as in {{"prompt": "Hello"}}')
    return jobs


def _prompt(argument: str | None) -> str:
    if argument not in (None, "-"):
        text = argument
    elif argument is None and sys.stdin.isatty():
        raise ConfigError('give a prompt, as in: send.py "Hello"; or pipe one in; or use --file')
    else:
        text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape").removesuffix("\n")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{ErrorCode.INVALID_REQUEST}: the prompt is not UTF-8; convert it first") from None
    if len(text.encode()) > PROMPT_BYTES:
        raise ConfigError(
            f"{ErrorCode.CONTEXT_LENGTH_EXCEEDED}: the prompt has more than {PROMPT_BYTES} bytes"
        )
    return text


def _object(line: bytes) -> dict[str, Any]:
    """A line of a jobs file. Raises ValueError."""
    try:
        value = json.loads(line.decode("utf-8"))
        json.dumps(value, ensure_ascii=False).encode()  # a lone \\ud800 has no place in a message
    except UnicodeError:
        raise ValueError("not UTF-8, or half of a surrogate pair; write it in UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos + 1})") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, not {type(value).__name__}")
    if len(line) > PROMPT_BYTES:
        raise ValueError(f"more than {PROMPT_BYTES} bytes; shorten it")
    return value


def _job(entry: dict[str, Any], label: str, defaults: dict[str, Any], raw: bool) -> BatchJob:
    """A job from its object. Raises ValueError; values of sampling fields are the node's to judge."""
    known = (*SOURCES, "label", *SAMPLING)
    for name in entry:
        if name not in known:
            raise ValueError(f"unknown field {name!r}; known are {', '.join(known)}")
    sources = [name for name in SOURCES if name in entry]
    if len(sources) != 1:
        raise ValueError(f"give exactly one of {', '.join(SOURCES)}, not {' and '.join(sources) or 'none'}")
    _check_source(sources[0], entry[sources[0]])
    label = entry.get("label", label)
    if not isinstance(label, str):
        raise ValueError(f"label must be text, not {label!r}")
    if sources == ["prompt"] and not raw:
        entry = entry | {"messages": [{"role": "user", "content": entry["prompt"]}], "prompt": None}
    sampling = defaults | {name: entry[name] for name in SAMPLING if name in entry}
    return BatchJob(label, **{name: entry.get(name) for name in SOURCES}, sampling=sampling)


def _check_source(name: str, value: Any) -> None:
    """The shape that a SUBMIT needs to be understood at all; the rest is the node's to judge."""
    if name == "prompt" and not isinstance(value, str):
        raise ValueError("prompt must be text")
    if name == "prompt_ids" and not (
        isinstance(value, list) and all(type(item) is int and abs(item) < 2**63 for item in value)
    ):
        raise ValueError("prompt_ids must be a list of whole numbers")
    if name == "messages" and not (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        raise ValueError("messages must be a list of objects with role and content")


def endpoint_of(given: argparse.Namespace) -> str:
    """Where to send to. Raises ConfigError, or NodeUnavailable at once when it is no socket."""
    if given.endpoint is not None:
        try:
            endpoint = check_connect_endpoint(given.endpoint)
        except ValueError as error:
            raise ConfigError(f"--endpoint {error}") from None
        if endpoint.startswith("ipc://") and not Path(endpoint.removeprefix("ipc://")).exists():
            raise NodeUnavailable(f"nobody listens at {endpoint}: there is no such socket")
        return endpoint
    pair = only_running_pair(lambda pair: f"--endpoint {pair.decode_endpoint}")
    return DecodeConfig.model_fields["bind"].default if pair is None else pair.decode_endpoint


class Sender:
    """Sends the jobs and shows what comes back."""

    def __init__(self, given: argparse.Namespace, jobs: list[BatchJob]) -> None:
        self._given = given
        self._jobs = jobs
        self._streams = len(jobs) == 1 and not given.json and jobs[0].sampling.get("n", 1) == 1
        self._connected = False
        self._interrupted = False
        self._advance: Callable[[], None] = lambda: None

    def run(self, endpoint: str) -> int:
        """The exit status."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)
        keys = keys_of(self._given)
        client = Client(endpoint, refused_timeout_ms=REFUSED_TIMEOUT_MS, keys=keys)
        with client, self._progress() as progress:
            self._connected = True
            if progress is not None:
                task = progress.add_task("jobs", total=len(self._jobs))
                self._advance = lambda: progress.advance(task)
            batch = Batch(
                client,
                self._jobs,
                concurrency=self._given.concurrency,
                on_text=self._show_text,
                on_end=self._show_end,
            )
            outcomes = batch.run(lambda: self._interrupted)
        if self._interrupted:
            unfinished = sum(not isinstance(outcome.answer, Finished) for outcome in outcomes)
            begun = "\n" if self._streams else ""
            tell(f"{begun}send: interrupted: {unfinished} of {len(outcomes)} jobs cancelled or not sent")
            return ExitStatus.ABORTED
        return int(any(not isinstance(outcome.answer, Finished) for outcome in outcomes))

    def _progress(self) -> Any:
        if len(self._jobs) == 1 or not sys.stderr.isatty():
            return nullcontext()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Answers on the same terminal go above the bar; those in a file or pipe are left alone.
        return Progress(
            *columns, console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty()
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted or not self._connected:
            sys.exit(ExitStatus.ABORTED)
        self._interrupted = True

    def _show_text(self, text: str) -> None:
        if self._streams:
            print(text, end="", flush=True)

    def _show_end(self, outcome: Outcome) -> None:
        self._advance()
        if self._given.json:
            print(json.dumps(_plain(outcome), ensure_ascii=False), flush=True)
        elif isinstance(outcome.answer, Finished):
            for number, choice in sorted(outcome.choices.items()):
                label = f"{outcome.job.label}.{number + 1}" if outcome.answer.reasons else outcome.job.label
                print("" if self._streams else f"[{label}] {choice.text}", flush=True)
        if not isinstance(outcome.answer, Finished) and not self._interrupted:
            code, detail = outcome.answer.code, outcome.answer.detail
            begun = "\n" if self._streams and outcome.text else ""
            tell(f"{begun}send: job {outcome.job.label}: {code}: {detail}; what to do: {code.advice}")


def _plain(outcome: Outcome) -> dict[str, Any]:
    """An outcome for --json. The stages sum to the total."""
    answer = outcome.answer
    reasons = answer.reasons if isinstance(answer, Finished) else ()
    if reasons or len(outcome.choices) > 1:
        choices = [
            {"index": number, **_plain_choice(choice), "finish_reason": dict(enumerate(reasons)).get(number)}
            for number, choice in sorted(outcome.choices.items())
        ]
        head = {"label": outcome.job.label, "choices": choices}
    else:
        head = {"label": outcome.job.label, **_plain_choice(outcome.choices[0])}
    if isinstance(answer, Finished):
        tail = {"finish_reason": answer.reason, "path": answer.path}
        return head | tail | {"usage": asdict(answer.usage), "timings": asdict(answer.timings)}
    definite = getattr(answer, "definite", answer.code.definite)
    error = {"code": answer.code, "detail": answer.detail, "definite": definite, "advice": answer.code.advice}
    return head | {"error": error}


def _plain_choice(choice: Choice) -> dict[str, Any]:
    told = {"logprobs": [asdict(logprob) for logprob in choice.logprobs]} if choice.logprobs else {}
    return {"text": choice.text, "token_ids": choice.token_ids, **told}


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """The exit status; errors are told without a traceback."""
    given = parse_arguments()
    try:
        jobs = jobs_of(given)
        return Sender(given, jobs).run(endpoint_of(given))
    except (ConfigError, ValueError) as error:
        tell(f"send: {error}")
        return ExitStatus.CONFIG
    except NodeUnavailable as error:
        tell(f"send: {error}\nsend: start a pair with scripts/up.py, or name the decode node with --endpoint")
        return 1
    except TandemError as error:
        tell(f"send: {error}")
        return 1
    except BrokenPipeError:
        # Who read the answers has left: the client's end has cancelled the jobs.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitStatus.ABORTED


if __name__ == "__main__":
    sys.exit(main())
