import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from data.target.served import engines
from eagle31.export.config_json import config_json
from eagle31.export.layouts import Layout
from tests.eagle31.tiny import DSPARK, tiny_config
from tests.train.report.finished_run import evaluation, run_info, serving
from train.report.card import model_card, serve_command
from train.report.results import Report

CONFIG: dict[str, Any] = {"model_type": "llama", "fc_norm": True, "norm_output": True}


def front_matter(card: str) -> dict[str, Any]:
    _, header, _ = card.split("---\n", 2)
    return yaml.safe_load(header)


def test_front_matter_parses_back() -> None:
    data = ["openai/gsm8k", "/data/private/chat.jsonl", "org/chat"]
    hub = {"target": "Qwen/Qwen3-8B", "train_data": data, "license": "other: ask # first"}
    card = model_card(Report(evaluation(), run_info() | hub), CONFIG)
    assert "`openai/gsm8k` and local files and `org/chat`" in card
    assert "chat.jsonl" not in card
    assert front_matter(card) == {
        "base_model": "Qwen/Qwen3-8B",
        "library_name": "vllm",
        "pipeline_tag": "text-generation",
        "license": "other: ask # first",
        "datasets": ["openai/gsm8k", "org/chat"],
        "tags": ["eagle3", "speculative-decoding", "vllm"],
    }


def test_paths_are_not_hub_ids_and_are_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for target in ("models/mine", str(tmp_path / "models" / "mine")):
        known = run_info() | {"target": target, "train_data": ["/data/private/chat.jsonl"]}
        card = model_card(Report(evaluation(), known), CONFIG)
        assert not {"base_model", "datasets", "license"} & front_matter(card).keys()
        assert not [path for path in (str(tmp_path), "/data/private", "/home/someone") if path in card]
        assert "vllm serve TARGET" in card
        assert "vllm.entrypoints.openai.api_server --gpu-memory-utilization 0.4 --enforce-eager" in card
        assert "TARGET is the directory of mine." in card


def test_every_number_has_k_temperature_and_engine() -> None:
    card = model_card(Report(evaluation(), run_info()), CONFIG)
    lines = [line for line in card.splitlines() if re.match(r"\| (un)?trained(,| \|)", line)]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    lengths = [row for row in rows if row[2] == "4"]
    assert [row[:2] + row[3:] for row in lengths] == [
        ["trained", "greedy", "0", "2.53", "2.42 to 2.65"],
        ["trained", "greedy", "1", "1.85", "1.74 to 1.97"],
        ["trained", "sampled", "1", "2.15", "2.04 to 2.27"],
        ["untrained", "greedy", "0", "1.00", "0.89 to 1.12"],
    ]
    positions = [row for row in rows if ", temperature " in row[0]]
    for row, length in zip(positions, lengths, strict=True):
        # The acceptance length is one more than the sum over the positions.
        rates = [int(one.removesuffix(" %")) for one in row[1:]]
        assert 1 + sum(rates) / 100 == pytest.approx(float(length[4]), abs=0.02)
    for shown in ("7 of 8 identical", "not from vLLM"):
        assert shown in card
    assert "users" not in card
    card = model_card(Report(evaluation(), run_info(), serving=serving("export")), CONFIG)
    assert "| 1 | 4 | 41.5 | 74.7 | 1.80x (1.62 to 1.97) | 2.50 |" in card
    assert "vLLM 0.32.0, float32, a CPU; temperature 0, at most 64 tokens per completion." in card
    engine = "vLLM 0.32.0, bfloat16, cuda, 8 at a time"
    card = model_card(Report(evaluation() | {"engine": engine}, run_info()), CONFIG)
    assert f"decoded by {engine}" in card
    assert "not from vLLM" not in card


def test_the_arguments_of_the_chat_template_are_stated() -> None:
    card = model_card(
        Report(evaluation(), run_info() | {"template_kwargs": {"enable_thinking": False}}), CONFIG
    )
    assert "| chat template | enable_thinking=False |" in card
    assert "chat template |" not in model_card(Report(evaluation(), run_info()), CONFIG)


def test_serve_command_survives_the_shell() -> None:
    known = {"target": "/models/my target", "export": "/runs/it's/export"}
    words = shlex.split(serve_command(known, 3, "vllm", "eagle3"))
    assert words[:4] == ["vllm", "serve", "/models/my target", "--speculative-config"]
    expected = {"model": "/runs/it's/export", "method": "eagle3", "num_speculative_tokens": 3}
    assert json.loads(words[4]) == expected


def test_a_dspark_drafter_is_served_as_one() -> None:
    config = config_json(tiny_config(**DSPARK), Layout.vllm, "bfloat16")
    card = model_card(Report(evaluation(), run_info()), config)
    assert "# DSpark drafter for" in card
    assert '"method": "dspark"' in card
    assert front_matter(card)["tags"][0] == "dspark"
    assert "which runs on GPUs. The server's `/metrics` count" in card
    assert "DSpark for the target's architecture, `LlamaForCausalLM`, is in vLLM" in card
    assert "SGLang" not in card
    assert "package for CPUs" not in card


def test_the_serve_command_of_other_layouts() -> None:
    known = {"target": "owner/target", "export": "/my export"}
    named = serve_command(known, 3, "speculators", "eagle3")
    assert shlex.split(named) == ["vllm", "serve", "/my export"]
    words = shlex.split(serve_command(known, 3, "sglang", "eagle3"))
    assert words[words.index("--speculative-draft-model-path") + 1] == "/my export"
    assert words[-1] == "4"  # the target's own token is counted too


@pytest.mark.parametrize("layout", ["vllm", "speculators", "sglang"])
def test_the_target_is_served_at_the_revision_and_with_the_code_of_the_run(layout: str) -> None:
    named = {"target": "owner/target", "target_revision": "v 2", "trust_remote_code": True}
    words = shlex.split(serve_command(run_info() | named, 3, layout, "eagle3"))
    place = words.index("owner/target")
    assert words[place + 1 : place + 4] == ["--revision", "v 2", "--trust-remote-code"]
    assert "| target revision | v 2 |" in model_card(Report(evaluation(), run_info() | named), CONFIG)


def test_the_serve_command_has_the_fastest_draft_length() -> None:
    card = model_card(Report(evaluation(), run_info()), CONFIG)
    assert '"num_speculative_tokens": 4' in card
    assert "scripts/bench/serving EXPORT --target TARGET -k 2 3 4 measures it" in card
    speed = serving("export")
    one, eight = speed["rows"]
    speed["rows"] = [one | {"k": 2, "drafter": 70.0}, one | {"k": 3, "drafter": 80.0}, one, eight]
    card = model_card(Report(evaluation(), run_info(), serving=speed), CONFIG)
    assert '"num_speculative_tokens": 3' in card
    assert "Of the measured k (2, 3, 4), 3 served 1 user fastest." in card


def test_card_of_a_run_without_evaluation() -> None:
    card = model_card(Report({}, run_info()), CONFIG | {"fc_norm": False, "norm_output": False})
    assert '"num_speculative_tokens": 3' in card
    assert "# EAGLE 3 drafter" in card
    assert "None" not in card


def test_the_engines_that_serve_the_target_are_named() -> None:
    vllm, sglang = engines()
    card = model_card(Report({}, run_info() | {"architecture": "Qwen3ForCausalLM"}), CONFIG)
    assert f"`Qwen3ForCausalLM`, is in {vllm} and {sglang}; this export has the layout `vllm`." in card
    card = model_card(Report({}, run_info() | {"architecture": "Gemma3ForCausalLM"}), CONFIG)
    assert f"**Warning.** {vllm} does not serve Gemma3ForCausalLM with EAGLE 3. {sglang} does" in card
