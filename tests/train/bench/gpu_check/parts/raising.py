from train.bench.gpu_check.record import Options, Record


def run(options: Options, record: Record) -> None:
    record.figure("before", 1)
    raise RuntimeError("the device is gone")
