"""Run jobs in vLLM's environment: read a file of jobs and write one result file per job.

`serving.py` starts this program. It imports the standard library, torch and vLLM, and nothing of eagle31.
Every job builds its engines in this process, so that Python is started and vLLM imported only once.
"""

import contextlib
import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

Json = dict[str, Any]
# The request, the tokens written before the draft, the drafted tokens, and how many were accepted.
Event = tuple[str, int, list[int], int]


def main() -> None:
    jobs_file, results = Path(sys.argv[1]), Path(sys.argv[2])
    # The engine must be in this process: drafts are recorded from its scheduler.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    jobs = json.loads(jobs_file.read_text())
    has_dspark = any(f'"method": "{name}"' in json.dumps(jobs) for name in ("dspark", "dflash"))
    if has_dspark:
        interpret_triton_on_cpu()
    for index, job in enumerate(jobs):
        print(f"=== job {index}: {job['kind']} {job['name']}", flush=True)
        try:
            import_vllm()
            if has_dspark:
                mend_norms_on_cpu()
            result = bench(job) if job["kind"] == "bench" else decode(job)
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            clean_up()
        partial = results / f".{index}.partial"
        partial.write_text(json.dumps(result))
        os.replace(partial, results / f"{index}.json")


def interpret_triton_on_cpu() -> None:
    """Have vLLM run DSpark and DFlash where there is no GPU, which vLLM does not offer.

    Its Model Runner V2, the one that has them, needs Triton. Interpreted, Triton's kernels run on the CPU,
    some ten times as slowly, and compute what they compute on a GPU. vLLM looks for a backend of that name.
    """
    from types import SimpleNamespace

    import torch

    if torch.cuda.is_available():
        return
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    from triton.backends import backends

    class Driver:
        """What vLLM and Triton ask of a driver."""

        is_active = staticmethod(lambda: True)
        get_current_target = staticmethod(lambda: SimpleNamespace(backend="cpu", arch=0, warp_size=1))
        get_current_device = staticmethod(lambda: 0)
        get_active_torch_device = staticmethod(lambda: torch.device("cpu"))
        get_device_interface = staticmethod(lambda: torch.cpu)

    backends.setdefault("cpu", SimpleNamespace(driver=Driver, compiler=None))


def mend_norms_on_cpu() -> None:
    """Have the norm of DSpark's keys take each layer's weights: vLLM's for the CPU takes those of layer 0.

    Source: vllm#46761.
    """
    import torch
    from vllm.model_executor.models import qwen3_dflash

    if torch.cuda.is_available():
        return
    norm = qwen3_dflash.ops.rms_norm

    def of_each_layer(out: Any, x: Any, weight: Any, epsilon: float) -> None:
        parts = zip(out, x, weight, strict=True) if weight.dim() == 2 else [(out, x, weight)]
        for part in parts:
            norm(*part, epsilon)

    qwen3_dflash.ops.rms_norm = of_each_layer


def import_vllm() -> None:
    """Import vLLM without collecting garbage, which would visit all that is imported time and again."""
    gc.disable()
    try:
        from vllm import LLM  # noqa: F401
    finally:
        gc.enable()


def decode(job: Json) -> Json:
    """Continuations of all prompts by one engine: completions, drafts, vLLM's counters."""
    import vllm

    llm = build(job["engine"], worker_extension_cls=f"__main__.{DraftReader.__name__}")
    events = record_drafts(llm)
    prompts = [{"prompt_token_ids": one} for one in job["prompts"]]
    outputs = llm.generate(prompts, sampling_params(job), use_tqdm=False)
    result = {
        "completions": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": placed_drafts(outputs, events),
        "counters": counters(llm),
        "model_runner": "V2" if llm.llm_engine.vllm_config.use_v2_model_runner else "V1",
        "vllm_version": vllm.__version__,
    }
    shut_down(llm)
    return result


def placed_drafts(outputs: list[Any], events: list[Event]) -> list[list[Json]]:
    """Return the events of each request, in the order of the prompts."""
    index_of = {output.request_id: index for index, output in enumerate(outputs)}
    drafts: list[list[Json]] = [[] for _ in outputs]
    for request_id, position, token_ids, num_accepted in events:
        # vLLM appends "-" and eight random characters to the id it hands out.
        drafts[index_of[request_id.rpartition("-")[0]]].append(
            {"position": position, "token_ids": token_ids, "num_accepted": num_accepted}
        )
    return drafts


class DraftReader:
    """What every worker of vLLM gets: a method that reads the tokens that it has just drafted."""

    model_runner: Any

    def read_drafts(self) -> Any:
        """Return vLLM's DraftTokenIds, for which Model Runner V2 gives placeholders."""
        runner = self.model_runner
        taken = runner.take_draft_token_ids()
        if runner.vllm_config.use_v2_model_runner:
            states = runner.req_states
            for name, token_ids in zip(taken.req_ids, taken.draft_token_ids, strict=True):
                token_ids[:] = states.draft_tokens[states.req_id_to_index[name], : len(token_ids)].tolist()
        return taken


def record_drafts(llm: Any) -> list[Event]:
    """Start recording every draft that the scheduler processes, and return the list of events.

    The scheduler is in this process, however many processes run the model.
    """
    events: list[Event] = []
    core = llm.llm_engine.engine_core.engine_core
    scheduler, executor = core.scheduler, core.model_executor
    update = scheduler.update_from_output
    executor.take_draft_token_ids = lambda: executor.collective_rpc("read_drafts")[-1]  # of the last stage

    def noting(scheduler_output: Any, model_runner_output: Any) -> Any:
        for request_id, drafted in scheduler_output.scheduled_spec_decode_tokens.items():
            request = scheduler.requests.get(request_id)
            row = model_runner_output.req_id_to_index.get(request_id)
            if request is None or row is None:
                continue
            emitted = model_runner_output.sampled_token_ids[row]
            if emitted:
                events.append((request_id, request.num_output_tokens, list(drafted), len(emitted) - 1))
        return update(scheduler_output, model_runner_output)

    scheduler.update_from_output = noting
    return events


def bench(job: Json) -> Json:
    """Run closed loops at several concurrencies. The engines take turns."""
    import vllm

    result: Json = {"measurements": [], "vllm_version": vllm.__version__}
    for group in [[side] for side in job["sides"]] if job["one_at_a_time"] else [job["sides"]]:
        engines = {side["k"]: build(side["engine"], **job["memory"]) for side in group}
        for llm in engines.values():
            for concurrency in job["concurrency"]:
                closed_loop(llm, job, concurrency, range(concurrency))
        for round_index in range(job["rounds"]):
            for concurrency in job["concurrency"]:
                # Every other round begins with the other end, so that no side always runs first.
                order = list(engines)[:: 1 if round_index % 2 == 0 else -1]
                number = max(job["num_requests"], 2 * concurrency)
                requests = range(round_index * number, (round_index + 1) * number)
                loops = {k: closed_loop(engines[k], job, concurrency, requests) for k in order}
                where = {"round": round_index, "concurrency": concurrency}
                result["measurements"] += [{"k": k, **where, **loops[k]} for k in order]
        while engines:
            shut_down(engines.popitem()[1])
    return result


def closed_loop(llm: Any, job: Json, concurrency: int, requests: range) -> Json:
    """Simulate `concurrency` users, each of whom sends a prompt when the previous one is answered.

    `prompts`, `num_tokens` and `seconds` have each request's prompt, the tokens of its answer, and the time
    from sending it to the last of them. `num_forwards` counts the target's forward passes of each sequence
    but those of its prompt, and `num_decoded` the tokens that they emitted.

    Args:
        requests: numbers that name the prompts, which repeat after the last one.
    """
    sampling = sampling_params(job)
    engine, prompts = llm.llm_engine, [index % len(job["prompts"]) for index in requests]
    submitted: list[float] = []
    lengths: dict[int, int] = {}
    seconds: dict[int, float] = {}
    num_forwards = num_decoded = 0
    while len(seconds) < len(prompts):
        while len(submitted) < len(prompts) and len(submitted) - len(seconds) < concurrency:
            prompt = {"prompt_token_ids": job["prompts"][prompts[len(submitted)]]}
            submitted.append(time.perf_counter())
            engine.add_request(str(len(submitted) - 1), prompt, sampling)
        for output in engine.step():
            index, length = int(output.request_id), len(output.outputs[0].token_ids)
            if index in lengths and length > lengths[index]:
                num_forwards += 1
                num_decoded += length - lengths[index]
            lengths[index] = length
            if output.finished:
                seconds[index] = time.perf_counter() - submitted[index]
    return {
        "prompts": prompts,
        "num_tokens": [lengths[index] for index in range(len(prompts))],
        "seconds": [seconds[index] for index in range(len(prompts))],
        "num_forwards": num_forwards,
        "num_decoded": num_decoded,
    }


def build(engine: Json, **options: Any) -> Any:
    """Return an engine like that of `vllm serve`. `engine` holds the arguments of `vllm.LLM`."""
    import torch
    from vllm import LLM

    # Free the engines before this one. What is frozen here, above all vLLM's imports, is not visited by the
    # collections of garbage in an engine's life.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    gc.freeze()
    return LLM(**(engine | options))


def sampling_params(job: Json) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=job["max_tokens"],
        ignore_eos=True,  # the stop tokens are given, and the same on both sides
        stop_token_ids=job["stop_token_ids"],
        detokenize=False,
    )


def counters(llm: Any) -> Json:
    """Return vLLM's counters of drafts, which a new engine begins at zero; zeros without a drafter."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    drafts = found.get("vllm:spec_decode_num_drafts")
    accepted = found.get("vllm:spec_decode_num_accepted_tokens")
    per_position = found.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    return {
        "num_drafts": drafts.value if drafts else 0,
        "num_accepted": accepted.value if accepted else 0,
        "accepted_per_position": list(per_position.values) if per_position else [],
    }


def shut_down(llm: Any) -> None:
    """End an engine and its process groups. The next `build` frees its memory, if nothing refers to it."""
    llm.llm_engine.engine_core.shutdown()


def clean_up() -> None:
    """Remove the process groups of an engine that failed."""
    from vllm.distributed import cleanup_dist_env_and_memory

    # Raised for the process groups of an engine that failed to start.
    with contextlib.suppress(AssertionError):
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
