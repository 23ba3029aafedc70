"""No file makes a reader fail with another error than the one it documents, or take much memory."""

import resource
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.readers import Reader, readers

NAMES = (
    "header",
    "tensors",
    "mapped",
    "pickled",
    "json",
    "sealed",
    "jsonl",
    "report",
    "serving",
    "step_times",
    "artifact",
    "shard",
    "sidecar",
    "store_manifest",
    "store_index",
    "store_shard",
    "config",
    "record",
    "probe",
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
    for name in found:  # a damaged file must not reach the next reader
        shutil.copytree(made / "valid", made / name)
    return {name: (made / name, reader) for name, reader in found.items()}


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


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("store_manifest", b'{"format": 4}'),
        ("store_manifest", b'{"format": 3}'),
        ("step_times", b'{"format": 1}'),
        ("report", b"{}"),
        ("step_times", b'{"format": 1, "export": 7}'),
    ],
)
def test_what_fuzzing_has_found(known: dict[str, tuple[Path, Reader]], name: str, content: bytes) -> None:
    directory, reader = known[name]
    assert not reader.run(directory, content)


def test_a_manifest_without_its_facts_is_of_no_finished_stage(known: dict[str, tuple[Path, Reader]]) -> None:
    directory, reader = known["artifact"]
    (directory / "stage.json").write_text('{"stage": "data", "inputs": {}}')
    assert not reader.read(directory)
