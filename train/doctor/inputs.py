"""The target and the data: on this machine, in the cache of Hugging Face, or to be downloaded."""

import os
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from data.conversations.reading import Source
from data.conversations.rows import is_file
from data.embedded.corpus import standard_library
from data.embedded.target import TargetSettings, fingerprint
from data.target.checkpoint import is_hub_id
from eagle31.errors import UserError
from train.config.run import RunConfig
from train.config.target import EMBEDDED
from train.doctor.check import Check, Status, judged, ok
from train.planning.memory_check import gigabytes


def target_check(model: str, missing_bytes: int, cached_bytes: int, offline: bool) -> Check:
    """Return whether the target is here.

    Args:
        missing_bytes: of its weights, which the cache of Hugging Face lacks.
        cached_bytes: of what the cache has of it.
        offline: whether nothing may be downloaded.
    """
    if model == EMBEDDED:
        return ok("target", "embedded: trained here", "")
    path = Path(model).expanduser()
    if path.is_dir():
        good = (path / "config.json").is_file()
        remedy = "It has no config.json: give the directory of a model as transformers saves it."
        return judged(
            "target",
            good,
            f"directory {model}",
            "config.json, weights",
            remedy,
            field="target.model",
            value=model,
        )
    if not is_hub_id(model):
        remedy = "There is no such directory: give one, or a Hub id such as org/name."
        return Check("target", Status.lacking, "missing", model, remedy, "target.model", model)
    if not missing_bytes:
        return ok("target", f"cached, {gigabytes(cached_bytes)}", model)
    found = f"{gigabytes(missing_bytes)} not cached" if cached_bytes else "not cached"
    return _download("target", found, model, "target.model", offline)


def data_checks(sources: Sequence[Source], cached: frozenset[str], offline: bool) -> list[Check]:
    """Return whether the sources of conversations are here.

    Args:
        cached: the ids of data sets in the cache of Hugging Face.
    """
    checks = []
    for source in sources:
        path, field = source.location, source.field
        if path == EMBEDDED:
            checks.append(ok(field, "embedded: made here"))
            continue
        try:
            local = is_file(path, field) or Path(path).expanduser().is_dir()
        except UserError as error:
            checks.append(Check(field, Status.lacking, "missing", path, error.remedy, field, path))
            continue
        if local:
            readable = os.access(Path(path).expanduser(), os.R_OK)
            remedy = "This account may not read it: change its mode or its owner."
            checks.append(judged(field, readable, f"{path}", "readable", remedy, field=field, value=path))
        elif path in cached:
            checks.append(ok(field, "cached", path))
        else:
            checks.append(_download(field, "not cached", path, field, offline))
    return checks


def _download(name: str, found: str, needed: str, field: str, offline: bool) -> Check:
    remedy = f"HF_HUB_OFFLINE is set: download it first (hf download {needed}), or give a directory."
    return judged(
        name,
        not offline,
        f"{found}, downloaded by the run" if not offline else found,
        needed,
        remedy,
        field=field,
        value=needed,
    )


def cached_bytes() -> dict[tuple[str, str], int]:
    """Return the bytes of each repository in the Hub's cache by kind ("model", "dataset") and id."""
    try:
        return {(one.repo_type, one.repo_id): one.size_on_disk for one in scan_cache_dir().repos}
    except (CacheNotFound, OSError):
        return {}


def is_downloaded(model: str) -> bool:
    """Whether a model is one of the Hub."""
    return model != EMBEDDED and not Path(model).expanduser().is_dir() and is_hub_id(model)


def lacks_embedded(config: RunConfig) -> bool:
    """Whether the run trains the embedded target first, because it uses it and the cache does not have it."""
    used = EMBEDDED in (config.target.model, config.data.train, config.data.eval)
    used = used or any(one.source == EMBEDDED for one in config.data.sources.values())
    made = Path(config.cache_dir) / "embedded" / fingerprint(standard_library(), TargetSettings())
    return used and not made.is_dir()


def is_offline() -> bool:
    """Whether nothing may be downloaded."""
    return constants.HF_HUB_OFFLINE


def hub_cache() -> Path:
    """Return the directory of downloaded models and data sets."""
    return Path(constants.HF_HUB_CACHE)
