"""vLLM's environment: where its Python is, and which variables its processes get."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from data.supervised import without_launcher
from data.target.served import architecture, unserved, ways
from data.target.spec import TargetSpec
from eagle31.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
SETUP = ROOT / "scripts" / "setup" / "vllm"
# The only directory of ours on the path of vLLM's processes, and the module in it that finds the others.
LOADER = ROOT / "data" / "capture" / "vllm" / "plugin" / "path" / "eagle31_vllm.py"
KEY_VARIABLE = "VLLM_API_KEY"  # the key that a server demands and a client sends; vLLM's own name
# Makes an engine's configuration as a server does, from the arguments that follow.
_CONFIGURE = """
import sys
from pydantic import ValidationError
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
arguments = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args()
try:
    AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
except ValidationError as error:
    sys.exit("error: " + "; ".join(" ".join([*map(str, one["loc"]), one["msg"]]) for one in error.errors()))
except Exception as error:
    sys.exit(f"error: {error}")
"""
# Exits with the second argument unless the class of the target, chosen as an engine does, has EAGLE 3.
_ASK = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.interfaces import supports_eagle3
config = EngineArgs(**json.loads(sys.argv[1])).create_model_config()
model, _ = ModelRegistry.resolve_model_cls(config.architectures, config)
sys.exit(0 if supports_eagle3(model) else int(sys.argv[2]))
"""
_NOT_SERVED = 3
# Python's settings are for our processes and not for vLLM's.
_OURS = (
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "VLLM_ENABLE_V1_MULTIPROCESSING"),
    # Of train.command, for GNU's OpenMP and for training.
    *("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"),
)

# A prompt may fill all the positions of the target: the token after it is never computed.
_LONGER = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}


def find_python() -> Path:
    """Return the Python of vLLM's environment: EAGLE31_VLLM_PYTHON, or what `scripts/setup/vllm` made.

    Raises:
        UserError: no such environment exists.
    """
    remedy = (
        "vLLM's environment does not exist; run scripts/setup/vllm, or set EAGLE31_VLLM_PYTHON to the Python "
        "of your own environment."
    )
    own = os.environ.get("EAGLE31_VLLM_PYTHON")
    if own:
        if not os.access(own, os.X_OK):
            raise UserError("EAGLE31_VLLM_PYTHON", own, remedy)
        return Path(own)
    printed = subprocess.run([str(SETUP), "--print"], capture_output=True, text=True, check=True)
    path = Path(printed.stdout.strip())
    if not (path.parent.parent / ".eagle31-stamp").exists():
        raise UserError("EAGLE31_VLLM_ENV", path.parent.parent, remedy)
    return path


def installed_version(python: Path) -> str | None:
    """Return the version of vLLM in an environment, by its metadata; None where it has none."""
    for path in sorted(python.parent.parent.glob("lib/python3*/site-packages/vllm*.dist-info")):
        return path.name.removesuffix(".dist-info").partition("-")[2]
    return None


def check_engine_args(python: Path, command_line: Sequence[str], given: Mapping[str, Any]) -> None:
    """Have vLLM check the arguments of an engine, without its weights.

    Args:
        command_line: all arguments of the engine, from `CaptureEngine`.
        given: those of the user, by the names that `vllm.LLM` has for them.

    Raises:
        UserError: vLLM refuses them, with its reason.
    """
    command = [str(python), "-I", "-c", _CONFIGURE, *command_line]
    variables = environment(python) | _LONGER
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if not done.returncode:
        return
    reason = " ".join(done.stderr.rpartition("error: ")[2].split()) or f"status {done.returncode}"
    named = [one for one in given if one in reason or one.replace("_", "-") in reason]
    field, value = (f"vllm.engine_args.{named[0]}", given[named[0]]) if named else ("vllm.engine_args", given)
    raise UserError(field, value, f"vLLM refuses it: {reason}")


def check_served(
    field: str, spec: TargetSpec, config: PreTrainedConfig, engine_args: Mapping[str, Any], remedy: str
) -> None:
    """Refuse a target of which vLLM neither captures hidden states nor drafts with an EAGLE 3 drafter.

    vLLM itself, which may have been changed, is asked about what the table of `data.target.served` lacks. It
    takes some seconds.

    Args:
        field: the setting that `spec` is from.
        config: the target's.
        engine_args: further arguments of `vllm.LLM`.

    Raises:
        UserError: it has no EAGLE 3 for the target's class, with this remedy and others; or it is missing.
    """
    name = architecture(config)
    if name is None or unserved(name) is None:
        return
    python = find_python()
    version = f"vLLM {installed_version(python)}"
    print(f"Asking {version} whether it serves {name} with EAGLE 3 ...", file=sys.stderr, flush=True)
    arguments = {
        "model": spec.checkpoint.path,
        "revision": spec.revision,
        "trust_remote_code": spec.trust_remote_code,
        "skip_tokenizer_init": True,
        **engine_args,
    }
    command = [str(python), "-I", "-c", _ASK, json.dumps(arguments), str(_NOT_SERVED)]
    status = subprocess.run(command, env=environment(python), capture_output=True).returncode
    if status == _NOT_SERVED:  # whatever else is wrong, the engine itself names
        raise UserError(
            field, spec.model, f"{version} does not serve {name} with EAGLE 3. {ways(name)} {remedy}"
        )


def environment(python: Path) -> dict[str, str]:
    """Return the environment of a process that runs vLLM."""
    variables = {name: value for name, value in without_launcher(os.environ).items() if name not in _OURS}
    variables.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; read on the CPU only
    variables.setdefault("VLLM_NO_USAGE_STATS", "1")
    # vLLM on the CPU expects Intel's OpenMP, which its environment has; drafting is slow without it.
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    if openmp.exists():
        variables.setdefault("LD_PRELOAD", str(openmp))
    # Threads that sleep as soon as they wait cost vLLM a tenth of its tokens per second, and those that spin
    # longer take as much from everything else on the same cores.
    variables.setdefault("KMP_BLOCKTIME", "1")  # milliseconds
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1:
        variables.pop("OMP_NUM_THREADS", None)  # torchrun's, for ranks that wait meanwhile
    return variables


def capture_environment(python: Path) -> dict[str, str]:
    """Return the environment of a vLLM process that captures, and of the workers that it starts."""
    return environment(python) | {
        "PYTHONPATH": str(LOADER.parent),
        # `python -m` would look in the working directory first, whose modules may have any name.
        "PYTHONSAFEPATH": "1",
        **_LONGER,
    }
