"""Which Python code of a checkpoint may run, for the log of whoever trusts it."""

import hashlib
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from transformers.utils.hub import extract_commit_hash

from data.target.checkpoint import read_model_json
from data.target.spec import TargetSpec


@cache
def announce_remote_code(spec: TargetSpec, path: Path | None) -> None:
    """Print to stderr, once and on rank 0, which code a configuration file makes transformers run.

    Args:
        spec: nothing is printed unless it has `trust_remote_code`.
        path: config.json or tokenizer_config.json; None where there is no such file.
    """
    if path is not None and spec.trust_remote_code and os.environ.get("RANK", "0") == "0":
        for line in remote_code(spec, path):
            print(f"target.trust_remote_code: {line}", file=sys.stderr, flush=True)


def remote_code(spec: TargetSpec, path: Path) -> list[str]:
    """Return a line for each class that the file names, with where its code is and which version.

    The version is the sha256 of a local file, and the commit of a repository on the Hub.
    """
    return sorted({_described(spec, path, name) for name in _classes(path)})


def _classes(path: Path) -> Iterator[str]:
    """Yield the classes, as `module.Class` or `owner/repository--module.Class`."""
    content = read_model_json(path)
    entries = content.get("auto_map") if isinstance(content, dict) else None
    for value in entries.values() if isinstance(entries, dict) else ():
        for name in value if isinstance(value, list) else [value]:  # a tokenizer has two, one may be null
            if isinstance(name, str):
                yield name


def _described(spec: TargetSpec, path: Path, name: str) -> str:
    repository, _, local = name.rpartition("--")
    module, _, class_name = local.rpartition(".")
    file = f"{module}.py"
    if repository:
        return f"{class_name} in {file} of {repository}, another repository, at its newest commit"
    if not os.path.isdir(spec.checkpoint.path):
        return f"{class_name} in {file} of {spec.model}, commit {extract_commit_hash(str(path), None)}"
    code = path.with_name(file)
    if not code.is_file():
        return f"{class_name} in {file}, which {spec.model} does not have"
    return f"{class_name} in {code}, sha256 {hashlib.sha256(code.read_bytes()).hexdigest()}"
