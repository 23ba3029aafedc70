import subprocess
import sys
import time

from train.bench.gpu_check.record import Options, Record


def run(options: Options, record: Record) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    record.figure("child", child.pid)
    time.sleep(600)
