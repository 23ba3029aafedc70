"""Damaged stores of hidden states: each command names the file and what to do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bad_input.commands import Case, CheckCase, each
from tests.data.store.samples import write_store
from tests.fuzz.damage import cut, directory, empty, flip, junk, remove
from train.command import FAILURE

SHARD, SIDECAR = "shard-a-00000.safetensors", "shard-a-00000.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    write_store(root / "store")
    write_store(root / "other", target="another")
    write_store(root / "template", template_fingerprint="another")
    return root


@pytest.fixture(autouse=True)
def stores(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)


def edited(**changes: Any) -> Callable[[Path], None]:
    return lambda path: (path.write_text(json.dumps(json.loads(path.read_text()) | changes)), None)[1]


def replaced(content: str) -> Callable[[Path], None]:
    return lambda path: (path.write_text(content), None)[1]


def case(
    name: str, command: str, file: str, change: Callable[[Path], None], *says: str, status: int = 2
) -> Case:
    output = ("out",) if command in ("copy", "merge", "convert") else ()
    return Case(
        name,
        (command, "store", *output),
        says,
        prepare=lambda root: change(root / "store" / file),
        script="scripts/store",
        status=status,
    )


ALTERED, JSON = "It was altered since it was written", "This is not JSON"
CASES = [
    case("settings_flipped", "info", "capture.json", flip, "store/capture.json", JSON),
    case("settings_edited", "verify", "capture.json", edited(target="x"), "store/capture.json", ALTERED),
    case("settings_cut", "merge", "capture.json", cut, "store/capture.json", JSON),
    case("settings_empty", "copy", "capture.json", empty, "store/capture.json", JSON),
    case("settings_junk", "convert", "capture.json", junk, "store/capture.json", JSON),
    case("settings_list", "retry", "capture.json", replaced("[]"), "store/capture.json", "an object is"),
    case(
        "settings_object", "info", "capture.json", replaced("{}"), "capture.json", "It lacks dataset_samples"
    ),
    case("settings_directory", "info", "capture.json", directory, "capture.json", "It is a directory where"),
    case("settings_missing", "info", "capture.json", remove, "STORE=store", "capture.json is missing"),
    case(
        "settings_missing_copy", "copy", "capture.json", remove, "STORE=store: It has lost its capture.json"
    ),
    case("manifest_flipped", "info", "manifest.json", flip, "store/manifest.json"),
    case("manifest_edited", "copy", "manifest.json", edited(target="x"), "store/manifest.json", ALTERED),
    case("manifest_cut", "verify", "manifest.json", cut, "store/manifest.json", JSON),
    case("manifest_junk", "merge", "manifest.json", junk, "store/manifest.json", JSON),
    case("manifest_list", "verify", "manifest.json", replaced("[]"), "store/manifest.json", "an object"),
    case("manifest_missing_copy", "copy", "manifest.json", remove, "STORE=store: It has no manifest.json"),
    case(
        "newer", "info", "manifest.json", edited(format=99), "A newer version", "format 99, not 4", "Use that"
    ),
    case("newer_copy", "copy", "manifest.json", edited(format=99), "A newer version", "format 99, not 4"),
    case("older", "verify", "manifest.json", edited(format=1), "format 1, not 4; delete it and capture"),
    case("index_cut_copy", "copy", "index.safetensors", cut, "index.safetensors", "missing or altered"),
    case(
        "index_directory", "copy", "index.safetensors", directory, "index.safetensors", "missing or altered"
    ),
    case(
        "sidecar_cut", "info", SIDECAR, cut, SIDECAR, "no shard's sidecar", "run again with the capture stage"
    ),
    case("sidecar_list", "merge", SIDECAR, replaced("[]"), SIDECAR, "no shard's sidecar"),
    case("sidecar_missing_copy", "copy", SIDECAR, remove, SIDECAR, "lost its sidecar"),
    case("sidecar_directory", "copy", SIDECAR, directory, SIDECAR, "no shard's sidecar"),
    case("shard_flipped_copy", "copy", SHARD, flip, SHARD, "delete it and run again"),
    case("shard_cut_copy", "copy", SHARD, cut, SHARD, "run again with the capture stage"),
    case("shard_missing_copy", "copy", SHARD, remove, SHARD, "The shard is gone"),
    Case(
        "another_target",
        ("merge", "store", "other", "out"),
        ("STORE=other: Its target differs from that of the first store",),
        script="scripts/store",
    ),
    Case(
        "another_template",
        ("merge", "store", "template", "out"),
        ("STORE=template: Its template_fingerprint differs",),
        script="scripts/store",
    ),
    Case("no_store", ("info", "nowhere"), ("STORE=nowhere: The directory holds no",), script="scripts/store"),
]
VERIFIED = {
    "index_cut": ("index.safetensors", cut, "missing or altered"),
    "index_flipped": ("index.safetensors", flip, "missing or altered"),
    "index_missing": ("index.safetensors", remove, "missing or altered"),
    "shard_cut": (SHARD, cut, "The shard had"),
    "shard_empty": (SHARD, empty, "The shard had"),
    "shard_flipped": (SHARD, flip, "The shard's checksum was"),
    "shard_missing": (SHARD, remove, "The shard is gone"),
    "shard_junk": (SHARD, junk, "The shard had"),
    "sidecar_missing": (SIDECAR, remove, "The shard has lost its sidecar"),
    "sidecar_junk": (SIDECAR, junk, "The file is no shard's sidecar"),
}


@each(CASES)
def test_a_damaged_store_is_named(case: Case, check_case: CheckCase) -> None:
    check_case(case)


@pytest.mark.parametrize("name", VERIFIED)
def test_verify_lists_what_is_damaged(name: str, check_case: CheckCase) -> None:
    file, change, what = VERIFIED[name]
    done = check_case(case(name, "verify", file, change, status=FAILURE))
    [line, *_] = [line for line in done.out.splitlines() if file in line]
    assert what in line
