"""Recipes and overrides that no run could use: refused before anything is read."""

from pathlib import Path

import pytest

from tests.bad_input.commands import Case, CheckCase, each
from train import compose

NEEDED = ("recipe=any_target", "target.model=a/b", "data.train=c.jsonl")


def of(argument: str, *says: str) -> Case:
    """Return the case of one argument, which names its key and its value."""
    key, _, value = argument.lstrip("+").partition("=")
    return Case(argument, (*NEEDED, argument), (f"error: {key}={value}: ", *says))


def empty(argument: str) -> Case:
    """Return the case of a value that is empty, which messages quote."""
    key, _, _ = argument.partition("=")
    says = (f"error: {key}='", "It is empty, perhaps by a shell variable without a value.")
    return Case(argument, (*NEEDED, argument), says)


def entry(argument: str, *says: str) -> Case:
    """Return the case of an entry of a list, or of a mapping, which the message names alone."""
    key, _, _ = argument.partition("=")
    return Case(argument, (*NEEDED, argument), (f"error: {key}", *says))


# A typo in the name of a choice, in a key, and in a value, for every group.
TYPOS = [
    of("capture=hf_onlin", "Did you mean hf_online"),
    of("data=ultrachatt", "Did you mean ultrachat"),
    of("deepspeed=zero4", "Did you mean zero"),
    of("deepspeed=ds_config.json", "Choose one of zero0"),
    of("drafter=eagle32", "Did you mean eagle3"),
    of("launcher=slrum", "Did you mean slurm?"),
    of("optim=adam", "Did you mean adamw?"),
    of("recipe=qwen3_8", "Did you mean qwen3_8b"),
    of("target=lama3_1_8b", "Did you mean llama3_1_8b"),
    of("capture.sourc=hf", "Did you mean capture.source"),
    of("data.num_wokers=1", "Did you mean data.num_workers"),
    of("data.regenerate.temprature=1", "Did you mean data.regenerate.temperature"),
    of("data.augment.systms=[none]", "Did you mean data.augment.systems"),
    of("deepspeed.stage=1", "Did you mean deepspeed.zero_stage"),
    of("deepspeed.zero_optimization.stage=1", "Did you mean deepspeed."),
    of("deepspeed.offload_optimiser=true", "Did you mean deepspeed.offload_optimizer"),
    of("drafter.hiden_size=8", "Did you mean drafter.hidden_size"),
    of("evaluate.k=4", "There is no such key"),
    of("evaluate.matrix.systems=[none]", "There is no such key"),
    of("export.dtyp=float32", "Did you mean export.dtype"),
    of("hub.repo=a/b", "Did you mean hub.repo_id"),
    of("launcher.node=2", "Did you mean launcher.nodes"),
    of("optim.learning_rate=1", "Did you mean"),
    of("plan.nodes=2", "plan.num_nodes"),
    of("target.modell=a", "Did you mean target.model"),
    of("tracking.projekt=a", "Did you mean tracking.project"),
    of("train.ttt_step=3", "Did you mean train.ttt_steps"),
    of("vllm.server=[a]", "Did you mean vllm.servers"),
    of("sed=1", "Did you mean seed?"),
    of("outputdir=a", "Did you mean output_dir?"),
    of("capture.mode=onlin", "Did you mean online"),
    of("capture.transport=moon", "Did you mean mooncake?"),
    of("data.turns=al", "Did you mean all?"),
    of("data.overlong=truncate", "Choose one of drop, cut."),
    of("deepspeed.precision=fp16", "Did you mean"),
    of("deepspeed.zero_stage=two", "Give a whole number"),
    of("deepspeed.zero_stage=4", "Choose 0, 1, 2 or 3"),
    of("deepspeed.offload_parameters=yes please", "Give true or false"),
    of("drafter.attention=mha", "Did you mean"),
    of("export.layout=vlm", "Did you mean vllm?"),
    of("launcher.kind=sbatch", "Choose one of local, slurm"),
    of("launcher.time=tomorrow", "Give minutes"),
    of("launcher.mem=1 TB", "Give a number followed by"),
    of("optim.name=adam", "Did you mean adamw?"),
    of("optim.schedule=cos", "Did you mean cosine"),
    of("optim.betas=0.9", "Give a list"),
    of("train.loss=k", "Did you mean kl?"),
    of("train.step_weights=decays", "Did you mean decay?"),
    of("vllm.placement=shard", "Did you mean shared?"),
    of("vllm.servers=http://a", "Give a list"),
    of("stages=[dat]", "Give a list of plan, data"),
    of("stages=train", "Give a list of plan, data"),
]
WRITTEN_WRONGLY = [
    Case("no_recipe", ("train.max_steps=3",), ("error: recipe=: Give recipe=NAME",)),
    Case("empty_recipe", ("recipe=",), ("error: recipe=: ", "There is no such choice")),
    Case("recipe_with_a_path", ("recipe=../train",), ("error: recipe=../train: ",)),
    Case("no_equals_sign", (*NEEDED, "banana"), ("error: argument=banana: Write it as key=value",)),
    Case("unknown_option", (*NEEDED, "--banana"), ("unrecognized arguments: --banana",)),
    Case(
        "no_value", ("recipe=any_target", "target.model=a/b"), ("error: data.train=???: This recipe needs",)
    ),
    of("train.max_steps=[1", "Put a value that has special characters into quotes"),
    of("data.train=a b:{c", "Put a value that has special characters into quotes"),
    of("train.max_steps=1,2", "Give one value"),
    of("train.max_steps=range(1,3)", "Give one value"),
    of("data.train={a: 1}", "Give a string, or null"),
    of("train=3", "It is a group of keys"),
    of("data.sources.a=3", "int is not a subclass of SourceConfig"),
    of("data.sources.a.weight=heavy", "weight"),
    empty("output_dir="),
    empty("output_dir=' '"),
    empty("cache_dir="),
    empty("target.model="),
    empty("target.revision=''"),
    empty("data.train="),
    empty("hub.repo_id="),
    empty("vllm.servers=['']"),
    of("output_dir=${nowhere}", "'nowhere' not found"),
    of("data.template_kwargs={1: 2}", "Key 1 (int) is incompatible with (str)"),
    entry("data.augment.templates=[banana]", "banana: Choose from unchanged"),
    entry("data.template_kwargs={a b: 1}", "a b=1: An argument of a template has a name"),
    of("vllm.engine_args.model=a", "The run sets it"),
    of("capture.codec=fp4", "fp8"),
    of("capture.final_states=some", "supervised"),
]


@each([*TYPOS, *WRITTEN_WRONGLY])
def test_a_mistake_names_key_value_and_remedy(case: Case, check_case: CheckCase) -> None:
    outcome = check_case(case)
    assert outcome.out == ""
    assert len(outcome.err.splitlines()) <= 4


@pytest.mark.parametrize("text", ["banana: 1\n", "a: [1\n", "- 1\n", "\0\n", "{}: {}: {}\n"])
@pytest.mark.parametrize("group", ["deepspeed", "recipe"])
def test_a_file_of_a_recipe_that_is_no_recipe_is_named(
    group: str, text: str, check_case: CheckCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    for path in compose.RECIPES.iterdir():
        if path.name != group:
            (recipes / path.name).symlink_to(path)
    (recipes / group).mkdir()
    for path in (compose.RECIPES / group).iterdir():
        (recipes / group / path.name).symlink_to(path)
    replaced = recipes / group / ("zero1.yaml" if group == "deepspeed" else "any_target.yaml")
    replaced.unlink()
    replaced.write_text(text)
    monkeypatch.setattr(compose, "RECIPES", recipes)
    check_case(Case("", (*NEEDED, "deepspeed=zero1"), ("error: recipe=any_target: ",)))
