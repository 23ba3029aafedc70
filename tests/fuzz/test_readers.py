"""No file makes a reader fail with another error than the one it documents, or take much memory."""

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.store.codec import check_encoded, encode
from tests.fuzz.reader import Reader
from tests.fuzz.readers import readers
from tests.fuzz.stores import FP8, SAMPLE

NAMES = (
    *("header", "tensors", "mapped", "pickled", "config", "record", "probe", "index", "target_index"),
    *("checkpoint", "checkpoint_sealed", "checkpoint_part"),
    *("shard", "sidecar", "store_manifest", "store_index", "store_shard", "refusals"),
    *("codec_bf16", "codec_fp8", "spool", "spool_in_memory", "mooncake"),
    *("json", "sealed", "jsonl", "report", "serving", "step_times", "artifact", "cells"),
    *("begun", "earlier", "best"),
    *("answers", "block", "block_arrow", "hashes"),
    *("saved_arrow", "saved_info", "saved_state", "chat_arrow", "chat_info"),
    *("request_store", "request_mooncake", "answer", "info"),
)
EDITS = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=4)
WORDS = st.sampled_from(
    [b"null", b"[]", b"{}", b"-1", b"1e999", b"0", b'"x"', b"9" * 30, b"[" * 3000, b"NaN"]
)
MEMORY_BYTES = 1 << 30


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Reader]]:
    made = tmp_path_factory.mktemp("readers")
    found = readers(made / "valid")
    known = {}
    for name, (valid, reader) in found.items():  # a damaged file must not reach the next reader
        known[name] = shutil.copytree(valid, made / name), reader
    return known


def edited(content: bytes, edits: list[tuple[int, int]], cut: int | None, word: bytes | None) -> bytes:
    """Return a content with some bytes replaced, a word in the place of one, and its end cut off."""
    changed = bytearray(content)
    for position, value in edits:
        changed[position % len(changed)] = value
    if word is not None and edits:
        position = edits[0][0] % len(changed)
        changed[position : position + 1] = word
    return bytes(changed[: None if cut is None else cut % len(changed)])


@pytest.mark.parametrize("name", NAMES)
def test_a_valid_file_is_read(known: dict[str, tuple[Path, Reader]], name: str) -> None:
    directory, reader = known[name]
    assert set(known) == set(NAMES)
    assert reader.run(directory, reader.content)


@pytest.mark.parametrize("name", NAMES)
def test_no_file_breaks_a_reader(
    known: dict[str, tuple[Path, Reader]], name: str, request: pytest.FixtureRequest
) -> None:
    directory, reader = known[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @settings(
        max_examples=500 if request.config.getoption("--full") else 30,
        deadline=5000,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.one_of(
            st.builds(
                edited,
                st.just(reader.content),
                EDITS,
                st.one_of(st.none(), st.integers(0, 1 << 16)),
                st.one_of(st.none(), WORDS),
            ),
            st.binary(max_size=200),
        )
    )
    def check(content: bytes) -> None:
        reader.run(directory, content)

    check()
    taken = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert taken < MEMORY_BYTES, f"{taken:,} bytes"


FOUND = [  # by reading the readers, and by fuzzing them
    ("store_manifest", {"format": 4}),
    ("store_manifest", {"format": 3}),
    ("step_times", {"format": 1}),
    ("step_times", {"format": 1, "export": 7}),
    ("report", {}),
    ("report", {"evaluation": [1], "run": {}, "metrics": []}),
    ("refusals", {"reason": "too long"}),
    ("sidecar", {"sample_ids": [1], "lengths": [10**30], "aux_rows": [1], "last_rows": [1]}),
    ("record", 4),
    ("answer", 4),
    ("answer", {"eagle31": [1]}),
    ("cells", []),
    ("cells", {"cells": [{"domain": 3}], "left_out": []}),
    ("begun", {"inputs": {"fixed": 3}, "continued_from": None}),
    ("earlier", {"inputs": {}}),
    ("best", {"files": {"drafter": 7}}),
    ("best", [1]),
    ("answers", [1]),
    ("request_store", {"eagle31": {"loss_spans": [[float("inf"), 3]], "destination": {}, "key": "1"}}),
    ("request_store", {"eagle31": {"loss_spans": [[1.5, "3"]], "destination": {}, "key": "1"}}),
    ("info", {"aux_layer_ids": 3, "roots": []}),
    ("info", {"aux_layer_ids": [1], "roots": ["/tmp"], "id": "a"}),
    ("checkpoint_sealed", {"weights": {"a": [2, 10**12]}, "optimizer_steps": {}}),
    ("checkpoint_sealed", {"files": {}}),
    ("saved_info", {"features": {"loss_mask": {"feature": {"dtype": "bool"}, "_type": "List"}}}),
    ("chat_info", {"features": {"prompt": {"feature": {"dtype": "bool"}, "_type": "List"}}}),
]


@pytest.mark.parametrize(("name", "value"), FOUND)
def test_what_was_found_is_refused(
    known: dict[str, tuple[Path, Reader]], name: str, value: dict[str, Any] | list[Any]
) -> None:
    directory, reader = known[name]
    if name == "checkpoint_sealed" and "weights" in value:  # all but the shape is right
        value = json.loads(reader.content) | value
    content = json.dumps(value).encode()
    assert not reader.run(directory, content + (b"\n" if name == "answers" else b""))


def test_remembered_hashes_that_are_damaged_count_as_none(known: dict[str, tuple[Path, Reader]]) -> None:
    directory, reader = known["hashes"]
    (directory / "hashes.json").write_text(json.dumps({str(directory): [[1e999], "0" * 64]}))
    assert reader.read(directory) == {}


@pytest.mark.parametrize(
    "damage",
    [
        {"aux_hidden_states": None},
        {"aux_hidden_states": torch.zeros(0, 10**9, 10**9, dtype=torch.float8_e4m3fn)},
        {"aux_hidden_states_exponents": torch.zeros(1, dtype=torch.uint8)},
        {"final_hidden_states_exponents": None},
        {"loss_mask": torch.ones(3, dtype=torch.bool)},
        {"loss_mask": torch.ones(14, dtype=torch.int8)},
        {"input_ids": torch.zeros(14, dtype=torch.int64)},
    ],
)
def test_an_encoded_sample_that_is_damaged_is_refused(damage: dict[str, torch.Tensor | None]) -> None:
    tensors = encode(SAMPLE, FP8)
    check_encoded(tensors)
    changed = {name: value for name, value in (tensors | damage).items() if value is not None}
    with pytest.raises(ValueError, match=r"^its? "):
        check_encoded(changed)


def test_a_manifest_without_its_facts_is_of_no_finished_stage(known: dict[str, tuple[Path, Reader]]) -> None:
    directory, reader = known["artifact"]
    (directory / "stage.json").write_text('{"stage": "data", "inputs": {}}')
    assert not reader.read(directory)
