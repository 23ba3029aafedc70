from train.bench.gpu_check.record import NotRun, Options, Record


def run(options: Options, record: Record) -> None:
    raise NotRun("There is no such engine here.")
