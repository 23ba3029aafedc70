"""What a process of a run does before the others are known."""

from unittest.mock import Mock

import pytest
import torch

from train.distributed import World


@pytest.mark.parametrize("variable", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_expand_unless_the_user_has_configured_the_allocator(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Mock()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", Mock())
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "max_split_size_mb:512")
    World(rank=1, local_rank=1, size=2).use_device()
    assert settings.call_args_list == ([] if variable else [(("expandable_segments:True",),)])
