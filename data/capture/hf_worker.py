"""Run as a process: the target through transformers, for a trainer that is fed online."""

from typing import Any

from data.capture.worker import Capture, serve
from eagle31.malloc import keep_freed_memory


def open_capture(settings: dict[str, Any]) -> Capture:
    """The target of `hf_producer`'s settings."""
    # Imported here: it takes seconds, in which requests are read already.
    import torch

    from data.capture.hf import HiddenStateCapture
    from data.target.loading import load_target
    from data.target.modules import locate
    from data.target.spec import TargetSpec

    spec = TargetSpec(**settings["target"])
    model = load_target(spec, torch.device(settings["device"]))
    return HiddenStateCapture(model, locate(model, spec), settings["aux_layer_ids"])


if __name__ == "__main__":
    keep_freed_memory()
    serve(open_capture)
