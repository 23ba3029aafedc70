"""The process of one part: it imports the part's module, calls its `run`, and writes what that finds."""

import importlib
import json
import sys
import traceback
from pathlib import Path

from eagle31.errors import UserError
from train.bench.gpu_check.record import NotRun, Options, Record


def main() -> int:
    module, findings, options = sys.argv[1], Path(sys.argv[2]), Options.from_json(json.loads(sys.argv[3]))
    record = Record(findings)
    try:
        importlib.import_module(module).run(options, record)
    except NotRun as reason:
        record.leave_out(str(reason))
    except UserError as error:
        record.fail(str(error))
        return 1
    except BaseException as error:
        traceback.print_exc()
        record.fail(f"{type(error).__name__}: {error}")
        return 1
    record.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
