#!/usr/bin/env python3
"""Fuzzes the readers of files, guided by coverage: python tests/fuzz/fuzz.py [SECONDS [READER ...]]

It needs Linux, and atheris: pip install --require-hashes -r tests/fuzz/requirements.txt. Each reader has so
many seconds. A content that breaks one is left in the current directory as READER-crash-*, READER-timeout-*
or READER-oom-*, and the exit status is 1 then.
"""

import os
import re
import resource
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import atheris

with atheris.instrument_imports(
    include=["eagle31", "data", "train", "json"], exclude=["data.embedded", "train.experiments"]
):
    from tests.fuzz.readers import readers
from tests.fuzz.reader import Reader

MEMORY_MB, FILE_SECONDS, MALLOC_MB = 4096, 20, 1024
LONGEST_BYTES = 1 << 16


def main() -> None:
    seconds, names = int((sys.argv[1:] or ["10"])[0]), sys.argv[2:]
    scratch = Path(tempfile.mkdtemp())  # not a TemporaryDirectory, which the first process to end removes
    try:
        found = readers(scratch / "valid")
        broken = [name for name in names or found if not _holds(name, *found[name], scratch, seconds)]
    finally:
        shutil.rmtree(scratch)
    if broken:
        sys.exit(f"broken: {', '.join(broken)}")


def _holds(name: str, directory: Path, reader: Reader, scratch: Path, seconds: int) -> bool:
    """Fuzz a reader in another process, and return whether nothing broke it."""
    corpus, log = scratch / f"corpus-{name}", scratch / f"{name}.log"
    corpus.mkdir()
    (corpus / "valid").write_bytes(reader.content)
    process = os.fork()  # libFuzzer ends its process
    if process == 0:
        _fuzz(name, directory, reader, corpus, log, seconds)
    _, status, usage = os.wait4(process, 0)
    (directory / reader.file).write_bytes(reader.content)  # the next reader may read it, too
    text = log.read_text(errors="replace")
    runs = re.search(r"number_of_executed_units:\s*(\d+)", text)
    line = f"{name:20} {runs[1] if runs else '?':>9} executions, peak {usage.ru_maxrss >> 10} MiB"
    print(f"{line}{f', BROKEN{chr(10)}{text[-4000:]}' if status else ''}", flush=True)
    return not status


def _fuzz(name: str, directory: Path, reader: Reader, corpus: Path, log: Path, seconds: int) -> None:
    """Run libFuzzer, which ends this process."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limits = [f"-max_total_time={seconds}", f"-rss_limit_mb={MEMORY_MB}", f"-malloc_limit_mb={MALLOC_MB}"]
    limits += [f"-timeout={FILE_SECONDS}", f"-max_len={min(2 * len(reader.content), LONGEST_BYTES)}"]
    limits += [f"-artifact_prefix={name}-", "-print_final_stats=1", str(corpus)]
    atheris.Setup([sys.argv[0], *limits], lambda content: (reader.run(directory, content), None)[1])
    try:
        atheris.Fuzz()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
