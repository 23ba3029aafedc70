"""What the target's answers come from: transformers, or vLLM."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from data.generation.answers import AnswerGenerator, answer_prompts
from data.generation.hf import TransformersGenerator
from data.generation.vllm import VllmGenerator
from data.sampling import Sampling
from data.vllm.endpoint import Endpoint
from data.vllm.engine import LocalEngine
from train.config.target import TargetEngine
from train.context import RunContext
from train.inference.vllm import capture_engine, expected_states, servers


@contextmanager
def answer_generator(context: RunContext) -> Iterator[AnswerGenerator]:
    """The recipe's engine; what it holds is free at the end."""
    config = context.config
    if config.target.engine is TargetEngine.hf:
        model, _ = context.load_target()
        yield TransformersGenerator(model, config.data.regenerate.batch_size)
        return
    writer = VllmGenerator(_endpoints(context), expected_states(context))
    try:
        yield writer
    finally:
        writer.close()


def target_answers(
    context: RunContext,
    writer: AnswerGenerator,
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
    return servers(context) or [LocalEngine(arguments, context.output_dir / "vllm-answers.log")]
