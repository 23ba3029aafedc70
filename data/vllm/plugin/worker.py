"""Runs vLLM in its own environment for `engine.py`: JSON lines on stdin, and on what was stdout.

The first line holds the arguments of `vllm.LLM`; each further one a prompt, how to sample behind it, and what
the connector is asked. It ends with its stdin: what was captured by then is written first, whether its parent
closed the pipe or died.
"""

import json
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO, TextIO

Json = dict[str, Any]


def main() -> None:
    sys.path[0] = str(Path(__file__).resolve().parents[3])  # where vLLM finds the connector
    answers = keep_stdout_for_answers()
    # One process holds engine and connector: none is left behind when it is killed.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Not sys.stdin, which Python closes at its end while the thread may still read.
    lines = os.fdopen(os.dup(0), "rb")
    arguments = json.loads(lines.readline())
    from vllm import LLM

    engine = LLM(**arguments).llm_engine
    say(answers, {"ready": True})
    prompts: queue.SimpleQueue[Json | None] = queue.SimpleQueue()
    threading.Thread(target=read_prompts, args=(lines, prompts), daemon=True).start()
    try:
        serve(engine, prompts, answers)
    finally:
        engine.engine_core.shutdown()


def keep_stdout_for_answers() -> TextIO:
    """vLLM and its libraries print: all that goes to the log."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def read_prompts(lines: BinaryIO, prompts: "queue.SimpleQueue[Json | None]") -> None:
    for line in lines:
        prompts.put(json.loads(line))
    prompts.put(None)


def serve(engine: Any, prompts: "queue.SimpleQueue[Json | None]", answers: TextIO) -> None:
    """Until stdin ends."""
    scheduler = engine.engine_core.engine_core.scheduler
    while True:
        # The scheduler has requests as long as the connector keeps their blocks, answered or not.
        while not scheduler.has_requests() or not prompts.empty():
            prompt = prompts.get()
            if prompt is None:
                return
            add(engine, prompt, answers)
        outputs = engine.step()
        for output in outputs:
            if output.finished:
                say(answers, answered(output))
        if not engine.has_unfinished_requests():
            time.sleep(0.001)  # only copies are awaited


def answered(output: Any) -> Json:
    (text,) = output.outputs
    return {
        "number": int(output.request_id),
        "answer": (output.kv_transfer_params or {}).get("eagle31", {}),
        "output_ids": list(text.token_ids),
        "finish_reason": text.finish_reason,
    }


def add(engine: Any, prompt: Json, answers: TextIO) -> None:
    """A prompt that vLLM refuses is answered with the reason."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    config = engine.vllm_config
    if config.kv_transfer_config is None and "describe" in prompt["params"].get("eagle31", {}):
        say(answers, {"number": prompt["number"], "answer": info_without_capture(config)})
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
        say(answers, {"number": prompt["number"], "refused": str(error)})


def info_without_capture(config: Any) -> Json:
    """What the connector says where there is one."""
    from data.vllm.server_info import engine_info

    name = f"{os.uname().nodename}-{os.getpid()}"
    return engine_info(config, name).to_json()


def say(answers: TextIO, message: Json) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
