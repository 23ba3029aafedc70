"""A preloaded interpreter is to its parent what a real one would be."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.preloaded.start import interpreter, program_of
from tests.train.launch.machines import SEPARATE, Machine, namespaces, require_namespaces

PROGRAM = """
import os, sys
print(__name__, __file__, sys.argv, sys.path[0], os.getcwd(), os.getppid())
print(os.environ["NAME"], sys.stdin.read())
print("Careful.", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def python() -> Path:
    return interpreter("small", sys.executable, ["json"], dict(os.environ))


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return tmp_path / "program.py"


def run(python: Path | str, *arguments: object, **more: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [python, *map(str, arguments)],
        cwd="/",
        env=os.environ | {"NAME": "value"} | more,
        input="input",
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("flag", [[], ["-u"], ["-I"]])
def test_a_program_sees_what_it_would_see(python: Path, program: Path, flag: list[str]) -> None:
    program.write_text(PROGRAM)
    ours, real = (run(one, *flag, program, "a b") for one in (python, sys.executable))
    assert ours == real
    assert ours[0] == 0
    assert "value input" in ours[1]


@pytest.mark.parametrize(
    "line",
    [
        "sys.exit(3)",
        "sys.exit('Not so.')",
        "os._exit(4)",
        "os.kill(os.getpid(), 9)",
        "import atexit; atexit.register(print, 'last')",
        "print(sys.path)",
        "import threading; threading.Timer(0.1, print, ['later']).start()",
    ],
)
def test_a_program_ends_as_it_would_end(python: Path, program: Path, line: str) -> None:
    program.write_text(f"import os, sys\n{line}\n")
    assert run(python, program, PYTHONPATH="/some") == run(sys.executable, program, PYTHONPATH="/some")


def test_a_command_sees_what_it_would_see(python: Path) -> None:
    line = "import sys; print(__name__, sys.argv, sys.path[0])"
    assert run(python, "-c", line, "a b") == run(sys.executable, "-c", line, "a b")


def test_descriptors_are_passed(python: Path, program: Path) -> None:
    program.write_text("import os, sys\nos.write(int(sys.argv[1]), b'here')\n")
    readers, writers = zip(*(os.pipe() for _ in range(3)), strict=True)
    for reader, writer in zip(readers, writers, strict=True):
        subprocess.run([python, program, str(writer)], pass_fds=writers, check=True, timeout=60)
        assert os.read(reader, 10) == b"here"
    for descriptor in (*readers, *writers):
        os.close(descriptor)


SPAWNING = """
import multiprocessing, sys, time

def work(pipe):
    pipe.send(sys.modules["json"].__name__)
    time.sleep(60)

if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=work, args=(theirs,))
    child.start()
    print(child.pid, ours.recv(), flush=True)
    time.sleep(60)
"""


def test_a_spawned_process_is_a_fork_that_ends_with_its_parent(python: Path, program: Path) -> None:
    program.write_text(SPAWNING)
    with subprocess.Popen([python, program], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        process, module = started.stdout.readline().split()
        assert module == "json"
        assert str(python) in Path(f"/proc/{process}/cmdline").read_text()
        started.kill()
        assert started.stdout.read() == ""  # the child has the other end, too


def test_a_program_is_in_the_namespaces_of_its_parent(python: Path) -> None:
    require_namespaces()
    line = "import os, platform; print(os.getpid(), platform.node(), os.listdir('/sys/class/net'))"
    setup = "hostname apart && mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /mnt && touch /mnt/apart"
    line += "; print(os.listdir('/mnt'), os.listdir('/proc/self/task') == [str(os.getpid())])"
    with namespaces(SEPARATE, setup) as process:
        machine = Machine("apart", "", process)
        printed = subprocess.run(
            machine.inside(str(python), "-c", line), capture_output=True, text=True, timeout=60, check=True
        ).stdout
    number, host, rest = printed.split(maxsplit=2)
    assert int(number) < 100
    assert (host, rest) == ("apart", "['lo']\n['apart'] True\n")


def test_an_error_has_its_traceback(python: Path, program: Path) -> None:
    program.write_text("raise KeyError('lost')\n")
    status, _, errors = run(python, program)
    assert status == 1
    assert errors.endswith("KeyError: 'lost'\n")


def test_modules_are_found_in_the_working_directory(python: Path, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("print(__name__)\n")
    done = subprocess.run([python, "-m", "one"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "__main__\n")


def alive(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_the_program(python: Path, program: Path, number: int) -> None:
    program.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    with subprocess.Popen([python, program], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        process = int(started.stdout.readline())
        assert alive(process)
        assert program_of(psutil.Process(started.pid)).pid == process
        started.send_signal(number)
        assert started.wait(timeout=30) == -number
        # The program holds the other end.
        assert started.stdout.read() == ""
    # Its end of the pipe closes before the process is gone.
    deadline = time.monotonic() + 30
    while alive(process) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(process)
