from train.bench.gpu_check.record import Options, Record


def run(options: Options, record: Record) -> None:
    record.check("the loss is that of the reference", False, "0.3 instead of 0.2")
