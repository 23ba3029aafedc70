"""Writes the table of what engines serve with EAGLE 3, and prints the rows of docs/recipes.md.

python -m tests.recipes.served
"""

import ast
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from zipfile import ZipFile

from data.capture.vllm.environment import environment, find_python
from data.target.served import TABLE
from eagle31.json_files import write_json

SGLANG = "0.5.23"
# What vLLM asks of a target's class before it drafts with an EAGLE 3 drafter, or keeps hidden states.
_ASK_VLLM = """
import json
import vllm
from vllm.model_executor.models import ModelRegistry, registry
from vllm.model_executor.models.interfaces import supports_eagle3

def serves(name):
    try:
        return supports_eagle3(ModelRegistry.models[name].load_model_cls())
    except ImportError:  # of a package that vLLM does not require, or of a GPU's kernels
        return False

kinds = ("TEXT_GENERATION", "TRANSFORMERS_SUPPORTED", "MULTIMODAL")
names = {name for kind in kinds for name in getattr(registry, f"_{kind}_MODELS")}
print()
print(json.dumps([vllm.__version__.partition("+")[0], sorted(filter(serves, names))]))
"""
# What SGLang asks for, and the endings of targets: other classes of its models are drafters, or embed texts.
_METHOD, _TARGETS = "set_eagle3_layers_to_capture", ("ForCausalLM", "ForConditionalGeneration")


def served_architectures(python: Path) -> dict[str, list[str]]:
    """Return the architectures by engine.

    Args:
        python: the Python of vLLM's environment, whose pip also downloads SGLang.
    """
    command = [str(python), "-I", "-c", _ASK_VLLM]
    done = subprocess.run(command, env=environment(python), stdout=subprocess.PIPE, text=True, check=True)
    version, names = json.loads(done.stdout.splitlines()[-1])
    with tempfile.TemporaryDirectory() as scratch:
        pip = [str(python), "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, f"sglang=={SGLANG}"]
        subprocess.run(pip, check=True)
        [wheel] = Path(scratch).glob("*.whl")
        with ZipFile(wheel) as files:
            models = [name for name in files.namelist() if name.startswith("sglang/srt/models/")]
            sources = [files.read(name).decode() for name in models if name.endswith(".py")]
    return {f"vLLM {version}": names, f"SGLang {SGLANG}": sglang_architectures(sources)}


def sglang_architectures(sources: Sequence[str]) -> list[str]:
    """Return the architectures in the sources of SGLang's models, which import packages for GPUs."""
    bases: dict[str, list[str]] = {}
    capturing, registered = set(), set()
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.ClassDef):
            bases[node.name] = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            if any(isinstance(one, ast.FunctionDef) and one.name == _METHOD for one in node.body):
                capturing.add(node.name)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
            registered |= {one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)}

    def captures(name: str) -> bool:
        return name in capturing or any(captures(base) for base in bases.get(name, []) if base != name)

    # "Assistant" is in the names of Gemma's own drafters, and MindSpore an engine for other models.
    others = ("Assistant", "MindSpore")
    targets = (name for name in registered if name.endswith(_TARGETS) and not any(o in name for o in others))
    return sorted(filter(captures, targets))


def table_rows(engines: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the rows of the table in docs/recipes.md, without what most names of their column end with."""
    (first, one), (second, other) = ((name, set(served)) for name, served in engines.items())
    groups = {
        f"{first}, {second}": one & other,
        f"{first} alone": one - other,
        f"{second} alone": other - one,
    }
    causal, conditional = _TARGETS
    rows = []
    for title, names in groups.items():
        text = [name.removesuffix(causal) for name in sorted(names) if name.endswith(causal)]
        others = [name.removesuffix(conditional) for name in sorted(names) if not name.endswith(causal)]
        rows.append(f"| {title} | {', '.join(text)} | {', '.join(others)} |")
    return rows


if __name__ == "__main__":
    found = served_architectures(find_python())
    write_json(TABLE, found)
    print(*table_rows(found), sep="\n")
