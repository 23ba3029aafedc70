"""The one module of ours on the path of vLLM's processes. It finds the other modules by their location.

vLLM imports it by name, for the connector in every process of an engine, and for the gate in the HTTP server.
Nothing else in the checkout is on the path, and it does not matter whether a user has a module that is called
`data`, too.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

_CHECKOUT = Path(__file__).resolve().parents[5]
_PACKAGES = ("eagle31", "data")


def load_packages() -> None:
    """Make our packages importable, whatever other modules have their names."""
    for name in _PACKAGES:
        directory = _CHECKOUT / name
        if str(directory) in getattr(sys.modules.get(name), "__path__", []):
            continue
        spec = spec_from_file_location(
            name, directory / "__init__.py", submodule_search_locations=[str(directory)]
        )
        assert spec is not None
        assert spec.loader is not None
        package = module_from_spec(spec)
        sys.modules[name] = package
        spec.loader.exec_module(package)


def __getattr__(name: str) -> Any:
    # Imported on demand: the HTTP server needs no connector.
    if name == "HiddenStatesConnector":
        from data.capture.vllm.plugin.connector import HiddenStatesConnector

        return HiddenStatesConnector
    if name == "Gate":
        from data.capture.vllm.plugin.gate import Gate

        return Gate
    raise AttributeError(name)


load_packages()
