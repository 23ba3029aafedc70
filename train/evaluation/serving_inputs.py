"""Inputs of check_serving and bench/serving: target, drafter and prompts; cheap checks come first."""

import argparse
import os
import sys
import tempfile
import typing
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from datasets import load_from_disk
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from data.capture.vllm.environment import check_served, find_python
from data.conversations.prompts import prompt_messages, render_prompt
from data.conversations.reading import Source
from data.target.loading import load_config
from data.target.spec import TargetSpec
from eagle31.errors import UserError
from eagle31.export.layouts import read_raw_config
from eagle31.export.published_config import read_config
from eagle31.json_files import read_json
from train.artifact import EXPORT, MANIFEST
from train.config.run import Stage
from train.config.target import TargetConfig
from train.evaluation.measure import common_positions
from train.evaluation.serving import DecodeJob, EngineSpec, JobResult, draft_room, run_job
from train.target import Target

Prompts = list[list[int]]
DTYPES = ("auto", "float32", "bfloat16", "float16")
# Arguments of vLLM's engine with which it would serve something else than what it is compared with.
_SET_HERE = {
    "model": "Give --target.",
    "revision": "Give --revision.",
    "dtype": "Give --dtype.",
    "speculative_config": "Give the drafter as EXPORT, and -k.",
}


def add_arguments(
    parser: argparse.ArgumentParser, several_draft_lengths: bool = False, prompts_given: bool = False
) -> None:
    """Add the arguments that check_serving, chat and bench/serving share.

    Args:
        several_draft_lengths: whether `-k` takes several of them and is a list.
        prompts_given: whether the prompts come from other arguments.
    """
    parser.add_argument("export", type=Path, help="directory of an export or of a published drafter")
    parser.add_argument("--target", required=True, help="the target: a directory or a hub id")
    parser.add_argument("--revision", help="revision of a target on the hub")
    if not prompts_given:
        what = "JSONL of conversations (default: held-out prompts of the export's run)"
        parser.add_argument("--prompts", type=Path, metavar="FILE", help=what)
        what = "use the first N prompts (default: all)"
        parser.add_argument("--num-prompts", type=int, metavar="N", help=what)
    if several_draft_lengths:
        what = "tokens per draft, as many as are to be compared (default: 4)"
        parser.add_argument("-k", type=int, nargs="+", default=[4], metavar="K", help=what)
    else:
        parser.add_argument("-k", type=int, default=4, help="tokens per draft (default: %(default)s)")
    what = "new tokens per prompt (default: %(default)s)"
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help=what)
    what = "dtype of target and drafter (default: the target's)"
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help=what)
    parser.add_argument("--trust-remote-code", action="store_true")
    what = "more arguments of vllm.LLM, such as tensor_parallel_size=8"
    parser.add_argument("--engine-args", nargs="+", default=[], metavar="NAME=VALUE", help=what)
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write every number to OUT")


def check_arguments(arguments: argparse.Namespace) -> Path:
    """Return the Python of vLLM's environment.

    Raises:
        UserError: it is missing, or an argument can be refused before any weight is read.
    """
    names = ("k", "concurrency", "max_new_tokens", "max_num_seqs", "num_prompts", "rounds", "num_requests")
    for name in names:
        given = getattr(arguments, name, None)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < 1:
                flag = "-k" if name == "k" else f"--{name.replace('_', '-')}"
                raise UserError(flag, value, "It must be at least 1.")
    if not sys.stderr.isatty():
        disable_progress_bar()
    read_raw_config(arguments.export)
    python, spec = find_python(), target_of(arguments).spec
    engine_args = parse_engine_arguments(arguments.engine_args)
    remedy = "Here, that is --engine-args model_impl=transformers."
    check_served("--target", spec, load_config(spec), engine_args, remedy)
    return python


@dataclass(frozen=True)
class Inputs:
    """The inputs, read once; prompts and limits fit the target and the drafter."""

    export: Path
    spec: TargetSpec  # its dtype is the one that is served
    prompts: Prompts
    prompts_source: str
    stop_token_ids: tuple[int, ...]
    k: int  # tokens per draft, of the longest drafts
    max_new_tokens: int
    engine_arguments: dict[str, Any]

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = self.spec.torch_dtype
        assert dtype is not None, "auto is resolved"
        return dtype

    @cached_property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def engine(self, *, drafter: bool = True, **options: Any) -> EngineSpec:
        """Return the spec of an engine with or without the drafter."""
        longest = max(map(len, self.prompts)) + self.max_new_tokens
        return EngineSpec(
            target=self.spec,
            export=self.export.absolute() if drafter else None,
            k=self.k,
            max_model_len=longest + draft_room(self.k),
            extra=self.engine_arguments,
            **options,
        )


def load_inputs(arguments: argparse.Namespace, question: str | None = None) -> Inputs:
    """Read the target's parts, the drafter's config and the prompts: a question, or those of the arguments.

    Raises:
        UserError: one of them cannot be read, or they do not fit each other.
    """
    longest = max(arguments.k) if isinstance(arguments.k, list) else arguments.k
    target = target_of(arguments)
    parts, tokenizer = target.parts, target.tokenizer
    dtype = parts.dtype_name if arguments.dtype == "auto" else arguments.dtype
    spec = replace(target.spec, dtype=dtype)
    config = read_config(read_raw_config(arguments.export), num_target_layers=parts.num_layers).config
    if question is not None:
        asked = [{"role": "user", "content": question}]
        prompts, source = [render_prompt(tokenizer, asked, None, {})], "the question"
    else:
        prompts, source = find_prompts(arguments.prompts, arguments.export, tokenizer, arguments.num_prompts)
    room = common_positions(parts, config) - draft_room(longest)
    check_prompts(prompts, room, arguments.max_new_tokens)
    return Inputs(
        export=arguments.export,
        spec=spec,
        prompts=prompts,
        prompts_source=source,
        stop_token_ids=target.eos_token_ids,
        k=longest,
        max_new_tokens=arguments.max_new_tokens,
        engine_arguments=parse_engine_arguments(arguments.engine_args),
    )


def target_of(arguments: argparse.Namespace) -> Target:
    """Return the target in the dtype of its checkpoint."""
    return Target(
        TargetConfig(arguments.target, arguments.revision, trust_remote_code=arguments.trust_remote_code)
    )


def complete(arguments: argparse.Namespace, inputs: Inputs, python: Path, name: str) -> JobResult:
    """Have vLLM complete the prompts with the drafter. Raises EngineFailure."""
    log, engine = log_file(arguments.json, name), inputs.engine(max_num_seqs=arguments.max_num_seqs)
    announce(f"Running vLLM (log: {log})")
    job = DecodeJob(name, engine, inputs.prompts, inputs.max_new_tokens, inputs.stop_token_ids)
    return run_job(job, python, log)


def log_file(json_file: Path | None, name: str) -> Path:
    """Return the file for vLLM's output: next to the results, or else a temporary file."""
    if json_file is not None:
        return json_file.with_suffix(".vllm.log")
    return Path(tempfile.gettempdir()) / f"eagle31-{name}-{os.getpid()}.log"


def parse_engine_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse pairs like `tensor_parallel_size=2 quantization=fp8`, as OmegaConf does.

    Raises:
        UserError: an option of the command sets an argument.
    """
    found = typing.cast(dict[str, Any], OmegaConf.to_object(OmegaConf.from_dotlist(list(pairs))))
    for name in found.keys() & _SET_HERE.keys():
        raise UserError("--engine-args", f"{name}={found[name]}", _SET_HERE[name])
    return found


def announce(message: str) -> None:
    """Print progress on stderr; the results go to stdout."""
    print(message, file=sys.stderr, flush=True)


def find_prompts(
    file: Path | None, export: Path, tokenizer: PreTrainedTokenizerBase, num_prompts: int | None
) -> tuple[Prompts, str]:
    """Return the prompts of `file`, else the held-out prompts of the export's run.

    Returns:
        The first `num_prompts` prompts, and their source.

    Raises:
        UserError: there are none.
    """
    held_out = held_out_answers(export)
    if file is not None:
        found = Source(str(file), require_answer=False, field="--prompts").reader()
        prompts = [render_prompt(tokenizer, prompt_messages(one), one.tools, {}) for one in found]
    elif held_out:
        rows = load_from_disk(str(held_out))
        prompts = [row["input_ids"][: row["num_prompt_tokens"]] for row in rows]
    else:
        remedy = "It is not the export of a run; give prompts with --prompts FILE."
        raise UserError("--prompts", "", remedy)
    source = str(file or held_out)
    if not prompts:
        raise UserError("--prompts", source, "It has no prompt; give a JSONL file of conversations.")
    return prompts[:num_prompts], source


def run_directory(export: Path) -> Path | None:
    """Return the OUTPUT_DIR of the run whose export this is; None for its earlier exports, and for others."""
    for path in (export.absolute(), export.resolve()):
        for parent in path.parents:
            if (parent / "run.json").exists() and (parent / EXPORT).resolve() == export.resolve():
                return parent
    return None


def held_out_answers(export: Path) -> Path | None:
    """Return the directory of the held-out test prompts of the run that wrote an export.

    The inputs of each result name those that it was made from.
    """
    made = export.resolve().parent
    with suppress(FileNotFoundError, KeyError):
        for stage in (Stage.train, Stage.capture, Stage.answers):
            made = made.parent / read_json(made / MANIFEST)["inputs"][stage.value]
        return made / "test"
    return None


def check_prompts(prompts: Prompts, room: int, max_new_tokens: int) -> None:
    """Raise UserError for prompts that are too long for `room` positions with their completions."""
    for index, prompt in enumerate(prompts):
        if len(prompt) + max_new_tokens > room:
            remedy = f"Its {len(prompt)} tokens and --max-new-tokens {max_new_tokens} are more than {room}, "
            remedy += "which target and drafter allow; leave it out or lower --max-new-tokens."
            raise UserError("--prompts", f"prompt {index}", remedy)
