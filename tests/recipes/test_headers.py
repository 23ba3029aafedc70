"""The headers of recipes say what is composed."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.recipes.headers import RECIPES, header
from tests.train.torchrun import composed

# What a header may say in figures, and what is composed.
FIGURES: dict[str, Callable[[Any], Any]] = {
    r"(?:of eight GPUs|on one GPU|\bOne GPU) of (\d+) GB": lambda run: run.plan.gpu_memory_gb,
    r"\b(\d+) steps": lambda run: run.train.ttt_steps,
    r"draft vocabulary of ([\d,]+)": lambda run: run.drafter.draft_vocab_size,
    # SGLang's count of outputs is less by one than that of layers applied.
    r"counts the outputs of these aux layers[^:]*: (\d+)": lambda run: run.drafter.aux_layer_ids[0] - 1,
    r"counts the outputs of these aux layers[^:]*: .*and (\d+)": lambda run: (
        run.drafter.aux_layer_ids[-1] - 1
    ),
    r"steps and (\de-\d) are those": lambda run: run.optim.lr,
    r"this recipe clips at ([\d.]+\d)": lambda run: run.optim.max_grad_norm,
    r"(\d+) TFLOP/s": lambda run: run.plan.tflops_per_gpu,
    r"gpt-oss-(\d+)[bB]": lambda run: float(run.target.model.removesuffix("b").rpartition("-")[2]),
    r"up to ([\d,]+) tokens": lambda run: run.data.max_tokens,
}
FILES = {f"recipe/{name}": (name,) for name in RECIPES} | {
    "recipe/base/vllm": ("qwen3_30b_a3b",),
    "machine/one_gpu": ("qwen3_8b", "machine=one_gpu"),
    "context/long": ("kimi_k2_6", "context=long"),
}


def figures(name: str) -> list[tuple[str, str]]:
    """Return each figure in a header with its pattern."""
    text = " ".join(header(name).split())
    return [(pattern, found) for pattern in FIGURES for found in re.findall(pattern, text)]


@pytest.mark.parametrize("name", FILES)
def test_the_figures_of_a_header_are_composed(name: str) -> None:
    run = composed(*FILES[name])
    for pattern, found in figures(name):
        assert float(found.replace(",", "")) == FIGURES[pattern](run), pattern


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_header_says_whether_the_target_thinks(recipe: str) -> None:
    off = False in composed(recipe).data.template_kwargs.values()
    assert off == ("Thinking is off" in header(f"recipe/{recipe}"))


def test_every_kind_of_figure_is_in_a_header() -> None:
    assert {pattern for name in FILES for pattern, _ in figures(name)} == set(FIGURES)
