"""Which engines serve a target with an EAGLE 3 drafter, from `python -m tests.recipes.served`."""

from functools import cache
from pathlib import Path

from transformers import PreTrainedConfig

from eagle31.export.layouts import Layout
from eagle31.json_files import read_json

TABLE = Path(__file__).with_suffix(".json")


@cache
def engines() -> dict[str, list[str]]:
    """Return by engine, such as "vLLM 0.32.0", the architectures that it serves with EAGLE 3."""
    return read_json(TABLE)


def architecture(config: PreTrainedConfig) -> str | None:
    """Return the architecture by which engines choose the target's class; None if the config has none."""
    return next(iter(config.architectures or ()), None)


def serving_engines(name: str | None) -> list[str]:
    """Return the engines that serve an architecture with EAGLE 3."""
    return [engine for engine, served in engines().items() if name in served]


def unserved(name: str | None, layout: Layout = Layout.vllm) -> str | None:
    """Return that the engine of a layout does not serve an architecture, and what may.

    None stands for an architecture that it serves, or that is not known.
    """
    brand = "SGLang" if layout is Layout.sglang else "vLLM"
    [engine] = [one for one in engines() if one.startswith(brand)]
    if name is None or name in engines()[engine]:
        return None
    return f"{engine} does not serve {name} with EAGLE 3. {ways(name)}"


def ways(name: str) -> str:
    """Return what serves or may serve an architecture that an engine does not serve with EAGLE 3."""
    others = [f"{one} does (export.layout={one.split()[0].lower()})." for one in serving_engines(name)]
    found = [*others, "Other versions may."]
    if not any(one.startswith("vLLM") for one in others):
        found.append("vLLM may with transformers' model of it: --model-impl transformers.")
    return " ".join(found)
