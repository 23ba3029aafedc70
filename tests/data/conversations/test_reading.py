import tracemalloc
from pathlib import Path

import numpy as np

from data.conversations.overlap import EvaluationPrompts
from data.conversations.read_sources import read_sources
from data.conversations.reading import ConversationReader
from data.conversations.schemas import Conversation
from data.conversations.split import prompt_hashes
from tests.data.conversations.jsonl_files import pair, write_jsonl


def test_sources_follow_each_other_with_what_identifies_their_prompts(tmp_path: Path) -> None:
    files = {
        "one": write_jsonl(tmp_path / "a.jsonl", [pair("a"), "{", pair("b c"), pair("a")]),
        "two": write_jsonl(tmp_path / "b.jsonl", [pair("b  c"), pair("d")]),
    }
    readers = {name: ConversationReader(file, max_malformed_fraction=0.5) for name, file in files.items()}
    evaluated = EvaluationPrompts()
    evaluated.add("set", [Conversation("x", ({"role": "user", "content": "B C"},))])
    read = read_sources(readers, tmp_path / "table.arrow", 0, evaluated)
    assert [one.messages[0]["content"] for one in read.table] == ["a", "b c", "a", "b  c", "d"]
    assert read.sources.tolist() == [0, 0, 0, 1, 1]
    assert read.overlaps.tolist() == [-1, 0, -1, 0, -1]
    # Ranks are those of the exact texts; hashes do not depend on white space.
    assert (read.ranks == read.ranks[0]).tolist() == [True, False, True, False, False]
    assert np.array_equal(read.prompts, prompt_hashes(list(read.table)))
    assert read.prompts[1] == read.prompts[3]
    assert len(readers["one"].malformed) == 1


def test_the_memory_does_not_depend_on_the_number_of_conversations(tmp_path: Path) -> None:
    peaks = []
    for number in (300, 3000):
        file = write_jsonl(tmp_path / f"{number}.jsonl", [pair(f"{i} " + "x" * 2000) for i in range(number)])
        tracemalloc.start()
        read = read_sources({"a": ConversationReader(file)}, tmp_path / f"{number}.arrow", 0)
        assert sum(1 for _ in read.table) == number
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 2700 * 200  # a conversation's text alone takes 2,000 bytes
