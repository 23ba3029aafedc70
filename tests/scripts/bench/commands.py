"""Commands of scripts/bench as modules: they have no extension."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

BENCH = Path(__file__).resolve().parents[3] / "scripts" / "bench"


def command(name: str) -> ModuleType:
    loader = SourceFileLoader(f"bench_{name}", str(BENCH / name))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
