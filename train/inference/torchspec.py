"""TorchSpec's engines as a recipe sets them up."""

from data.torchspec.settings import TorchSpecSettings
from train.config.capture import CaptureConfig
from train.inference.online import mooncake_settings
from train.inference.target import CapturedTarget


def torchspec_settings(target: CapturedTarget, capture: CaptureConfig, max_tokens: int) -> TorchSpecSettings:
    """Return the settings with which TorchSpec's engines run the target.

    Args:
        max_tokens: length of the longest sample.
    """
    torchspec, parts = capture.torchspec, target.parts
    assert torchspec.python is not None
    return TorchSpecSettings(
        python=torchspec.python,
        target=target.spec.checkpoint.path,
        aux_layer_ids=target.aux_layer_ids,
        num_layers=parts.num_layers,
        hidden_size=parts.hidden_size,
        max_tokens=max_tokens,
        mooncake=mooncake_settings(capture.mooncake),
        rope_parameters=getattr(parts.config.get_text_config(), "rope_parameters", None) or {},
        overrides=tuple(torchspec.overrides),
        trust_remote_code=target.spec.trust_remote_code,
    )
