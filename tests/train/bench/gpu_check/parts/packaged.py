import importlib

from train.bench.gpu_check.record import Options, Record


def run(options: Options, record: Record) -> None:
    record.figure("answer", importlib.import_module("eagle31_test_wheel").ANSWER)
