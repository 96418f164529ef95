"""Where a model's files are, and how they come to be there.

Decides what `--model` means (the built-in name, a GGUF file, or a Hugging Face directory), where the cache
lies, and which digests identify a model. Called by the torch engine, for the tokenizer, and by
`scripts/fetch_model.py`. Loading must never use the network, and a converted model's source is not hashed
again: the named model is fetched by the script alone, and a manifest beside the converted files remembers the
digest of their source.

A conversion is written to a directory of its own and renamed when it is whole, under a lock, so that a killed
process or two at once do no harm.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from common.engines.gguf_conversion import CONVERSION_VERSION, convert_gguf
from common.engines.hf_tokenizer import HuggingFaceTokenizer, read_json
from common.engines.registry import NAMED_MODEL
from common.errors import ConfigError

NAMED_MODEL_FILE = f"{NAMED_MODEL}.Q4_1.gguf"
NAMED_MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_MANIFEST = "tandem.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_READ_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model that can be loaded: a Hugging Face directory, and what identifies it to the other node."""

    directory: Path
    model_id: str
    weights_digest: str
    tokenizer_digest: str


def cache_directory() -> Path:
    """Where converted models lie: TANDEM_CACHE, else `tandem` in the user's cache directory."""
    if chosen := os.environ.get("TANDEM_CACHE"):
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "tandem"


def resolve_model(model: str) -> ModelFiles:
    """The files that `--model` means. A GGUF file is converted now, if it never was.

    Raises ConfigError that says what is wrong and what would be right.
    """
    if model == NAMED_MODEL:
        directory = converted_directory(NAMED_MODEL_SHA256)
        if not is_converted(directory):
            raise ConfigError(
                f"model {NAMED_MODEL} is not in {cache_directory()} yet; run scripts/fetch_model.py"
            )
        return _identify(directory)
    path = Path(model).expanduser().absolute()
    if path.is_dir():
        return _identify(path)
    if path.is_file():
        return _identify(_converted_file(path))
    raise ConfigError(
        f"no model at {model}; give {NAMED_MODEL}, a .gguf file, or a directory with config.json and "
        f"safetensors files (models are never downloaded from a hub)"
    )


def load_hugging_face_tokenizer(model: str) -> HuggingFaceTokenizer:
    """The tokenizer of what `--model` means. Raises ConfigError like `resolve_model`."""
    return HuggingFaceTokenizer(resolve_model(model).directory)


def converted_directory(source_sha256: str) -> Path:
    """Where the conversion of a GGUF file with this digest lies or would lie."""
    return cache_directory() / "models" / f"{source_sha256[:16]}-{CONVERSION_VERSION}"


def is_converted(directory: Path) -> bool:
    """Whether a whole conversion is there. It is renamed into place, so there is no half one."""
    return (directory / _MANIFEST).is_file()


def convert_once(source: Path, source_sha256: str, model_id: str) -> Path:
    """Directory with the conversion of `source`, made if it is not there. Raises ConfigError if it fails."""
    target = converted_directory(source_sha256)
    if is_converted(target):
        return target
    with one_process(target.with_suffix(".lock")):
        if is_converted(target):
            return target
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            convert_gguf(source, partial)
            manifest = {
                "model_id": model_id,
                "source": source.name,
                "source_bytes": source.stat().st_size,
                "source_sha256": source_sha256,
            }
            (partial / _MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
            for path in partial.iterdir():
                _flush(path)  # a rename that outlives a power cut must not lead to files that do not
            partial.rename(target)
        except OSError as error:
            raise ConfigError(f"cannot convert {source} into {target.parent}: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


@contextmanager
def one_process(lock_path: Path) -> Iterator[None]:
    """Hold a file lock for the block; others wait. It ends with the process, however that ends."""
    try:
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_path.open("w")
    except OSError as error:
        raise ConfigError(f"cannot use {lock_path.parent}: {error}; set TANDEM_CACHE") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _converted_file(path: Path) -> Path:
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ConfigError(f"{path} is not a GGUF file; give a .gguf file or a model directory")
        digest = _remembered_sha256(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    name = NAMED_MODEL if digest == NAMED_MODEL_SHA256 else path.stem
    return convert_once(path, digest, name)


def _remembered_sha256(path: Path) -> str:
    """SHA-256 of a GGUF file, read only when its place, size or time is new."""
    status = path.stat()
    facts = {"path": str(path), "bytes": status.st_size, "modified_ns": status.st_mtime_ns}
    note = cache_directory() / "digests" / f"{xxhash.xxh3_64_hexdigest(os.fsencode(path))}.json"
    with one_process(note.with_suffix(".lock")):
        if note.is_file():
            known = read_json(note)
            digest = known.pop("sha256", None)
            if known == facts and digest:
                return str(digest)
        digest = file_sha256(path)
        note.write_text(json.dumps(facts | {"sha256": digest}), encoding="utf-8")
    return digest


def _identify(directory: Path) -> ModelFiles:
    """A directory as a model. Raises ConfigError when it is none."""
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} is not a model directory: it has no config.json")
    tokenizer_digest = _content_digest([directory / name for name in _TOKENIZER_FILES])
    if is_converted(directory):
        manifest = read_json(directory / _MANIFEST)
        digest = f"sha256:{manifest['source_sha256']}"
        return ModelFiles(directory, manifest["model_id"], digest, tokenizer_digest)
    weights = sorted(directory.glob("*.safetensors"))
    if not weights:
        raise ConfigError(f"{directory} has no safetensors files; weights in other forms are not loaded")
    return ModelFiles(directory, directory.name, _content_digest(weights), tokenizer_digest)


def _content_digest(paths: list[Path]) -> str:
    """XXH3-128 over names and contents of those files that exist."""
    digest = xxhash.xxh3_128()
    for path in paths:
        if not path.is_file():
            continue
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        try:
            with path.open("rb") as file:
                while block := file.read(_READ_BYTES):
                    digest.update(block)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
    return f"xxh3:{digest.hexdigest()}"
