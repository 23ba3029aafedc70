from train.bench.gpu_check.record import Options, Record


def run(options: Options, record: Record) -> None:
    record.figure("speed", 1234.5, "tokens/s")
    record.check("the sum is right", 1 + 1 == 2, "1 + 1 = 2 < 3 & more")
