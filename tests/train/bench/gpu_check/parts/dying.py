import os
import signal

from train.bench.gpu_check.record import Options, Record


def run(options: Options, record: Record) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
