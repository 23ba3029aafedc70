"""What the target's answers come from: transformers, or vLLM."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from data.generation.answers import AnswerWriter, answer_prompts
from data.generation.transformers_writer import TransformersWriter
from data.generation.vllm_writer import VllmWriter
from data.sampling import Sampling
from data.vllm.endpoint import Endpoint
from data.vllm.engine import OwnEngine
from train.config.target import TargetEngine
from train.context import RunContext
from train.inference.vllm import capture_engine, servers, wanted_states


@contextmanager
def answer_writer(context: RunContext) -> Iterator[AnswerWriter]:
    """The recipe's engine; what it holds is free at the end."""
    config = context.config
    if config.target.engine is TargetEngine.hf:
        model, _ = context.load_target()
        yield TransformersWriter(model, config.data.regenerate.batch_size)
        return
    writer = VllmWriter(_endpoints(context), wanted_states(context))
    try:
        yield writer
    finally:
        writer.close()


def target_answers(
    context: RunContext,
    writer: AnswerWriter,
    prompts: Sequence[Sequence[int]],
    output: Path,
    *,
    max_new_tokens: int,
    temperature: float,
) -> list[list[int]]:
    """As `answer_prompts`, with what the run says of itself."""
    sampling = Sampling(max_new_tokens, context.eos_token_ids, temperature, context.config.seed)
    return answer_prompts(
        writer,
        prompts,
        sampling,
        output=output,
        model_fingerprint=context.parts.fingerprint,
        progress=True,
    )


def _endpoints(context: RunContext) -> list[Endpoint]:
    """The recipe's servers, or an engine that captures nothing; starts nothing yet."""
    arguments = capture_engine(context).answer_arguments()
    return servers(context) or [OwnEngine(arguments, context.output_dir / "vllm-answers.log")]
