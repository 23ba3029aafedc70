"""The process that writes completions with transformers on one device, driven by JSON lines."""

import sys
from collections.abc import Callable
from typing import Any

from data.processes.child import Channel, Message
from eagle31.errors import UserError


def serve() -> None:
    """Answer batches until the parent ends.

    The settings have `target` and `device`. A request has a batch's `number`, `prompts`, `seed` and
    `sampling`; the answer has its `number` and `answers`.
    """
    channel = Channel(exit_with_parent=True)
    try:
        generate = _open(channel.settings)
        channel.ready()
        while (request := channel.requests.get()) is not None:
            channel.answer({"number": request["number"], "answers": generate(request)})
    except UserError as error:
        channel.fail([error.field, str(error.value), error.remedy])
        sys.exit(1)


def _open(settings: dict[str, Any]) -> Callable[[Message], list[list[int]]]:
    """Load the target; return the function that answers a request."""
    # Imported here: this takes seconds, in which requests are already read.
    import torch

    from data.generation.hf import generate_batch, generation_config
    from data.sampling import Sampling
    from data.target.loading import load_target
    from data.target.spec import TargetSpec

    device = torch.device(settings["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels that name no device use the current one
    model = load_target(TargetSpec(**settings["target"]), device)

    def generate(request: Message) -> list[list[int]]:
        config = generation_config(Sampling(**request["sampling"]))
        return generate_batch(model, request["prompts"], config, request["seed"])

    return generate


if __name__ == "__main__":
    serve()
