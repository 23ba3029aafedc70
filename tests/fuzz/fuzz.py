#!/usr/bin/env python3
"""Fuzzes the readers of files, guided by coverage: python tests/fuzz/fuzz.py [SECONDS [READER ...]]

It needs atheris (pip install atheris) and Linux. A file that breaks a reader is left in
the current directory as crash-*.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import atheris

with atheris.instrument_imports(
    include=["eagle31", "data.store", "train.artifact", "train.reporting", "json"]
):
    from tests.fuzz.readers import readers

MEMORY_MB, FILE_SECONDS = 4096, 20


def main() -> None:
    seconds, names = int((sys.argv[1:] or ["10"])[0]), sys.argv[2:]
    with tempfile.TemporaryDirectory() as scratch:
        found = readers(Path(scratch) / "valid")
        if len(names) != 1:
            for name in names or found:  # libFuzzer ends its process
                print(f"{name}:", flush=True)
                subprocess.run([sys.executable, __file__, str(seconds), name], check=True)
            return
        reader, corpus = found[names[0]], Path(scratch) / "corpus"
        corpus.mkdir()
        (corpus / "valid").write_bytes(reader.content)
        limits = [f"-max_total_time={seconds}", f"-rss_limit_mb={MEMORY_MB}", f"-timeout={FILE_SECONDS}"]
        longest = f"-max_len={2 * len(reader.content)}"
        atheris.Setup(
            [sys.argv[0], *limits, longest, "-verbosity=0", "-print_final_stats=1", str(corpus)],
            lambda content: (reader.run(Path(scratch) / "valid", content), None)[1],
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
