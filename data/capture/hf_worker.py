"""The process that runs the target through transformers for online training."""

from typing import Any

from data.capture.worker import TargetCapture, serve


def open_capture(settings: dict[str, Any]) -> TargetCapture:
    """Load the target that `hf_producer`'s settings describe."""
    # Imported here: this takes seconds, in which requests are already read.
    import torch

    from data.capture.hf import HiddenStateCapture
    from data.target.loading import load_target
    from data.target.modules import locate
    from data.target.spec import TargetSpec

    spec, device = TargetSpec(**settings["target"]), torch.device(settings["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels that name no device use the current one
    model = load_target(spec, device)
    return HiddenStateCapture(model, locate(model, spec), settings["aux_layer_ids"])


if __name__ == "__main__":
    serve(open_capture)
