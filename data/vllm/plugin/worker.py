"""Run vLLM in its own environment for `engine.py`, driven by JSON lines.

The settings are the arguments of `vllm.LLM`. A request holds a prompt, its sampling parameters and the
parameters of the connector. When the parent ends, what was captured by then is still written.
"""

import gc
import os
import queue
import time
from typing import Any

from data.processes.child import Channel, Message


def main() -> None:
    channel = Channel()
    # One process holds engine and connector, so that killing it leaves none of them running.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    gc.disable()  # the collector would visit all that is imported time and again
    from vllm import LLM

    gc.enable()
    engine = LLM(**channel.settings).llm_engine
    channel.ready()
    try:
        serve(engine, channel)
    finally:
        engine.engine_core.shutdown()


def serve(engine: Any, channel: Channel) -> None:
    """Answer prompts until the parent ends or wants no more."""
    scheduler = engine.engine_core.engine_core.scheduler
    prompts: queue.SimpleQueue[Message | None] = channel.requests
    while True:
        # The scheduler has requests as long as the connector keeps their blocks, answered or not.
        while not scheduler.has_requests() or not prompts.empty():
            prompt = prompts.get()
            if prompt is None:
                return
            add(engine, prompt, channel)
        outputs = engine.step()
        for output in outputs:
            if output.finished:
                channel.answer(answer_to(output))
        if not engine.has_unfinished_requests():
            time.sleep(0.001)  # Only copies are awaited.


def answer_to(output: Any) -> Message:
    """Return the message that answers a prompt."""
    (completion,) = output.outputs
    return {
        "number": int(output.request_id),
        "answer": (output.kv_transfer_params or {}).get("eagle31", {}),
        "output_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }


def add(engine: Any, prompt: Message, channel: Channel) -> None:
    """Hand a prompt to the engine; one that vLLM refuses is answered with the reason."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    config = engine.vllm_config
    if config.kv_transfer_config is None and "describe" in prompt["params"].get("eagle31", {}):
        channel.answer({"number": prompt["number"], "answer": info_without_capture(config)})
        return
    try:
        sampling = SamplingParams(
            **prompt["sampling"],
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": prompt["params"]} if prompt["params"] else None,
        )
        inputs = {"prompt_token_ids": prompt["input_ids"]}
        engine.add_request(str(prompt["number"]), inputs, sampling)
    except ValueError as error:
        channel.answer({"number": prompt["number"], "refused": str(error)})


def info_without_capture(config: Any) -> Message:
    """Return the server info of an engine without the connector, which otherwise gives it."""
    from data.vllm.server_info import engine_info

    name = f"{os.uname().nodename}-{os.getpid()}"
    return engine_info(config, name).to_json()
