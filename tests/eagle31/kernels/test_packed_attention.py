"""Where the flash kernel is taken: by the card, the dtype and the width of a head."""

from types import SimpleNamespace

import pytest
import torch

from eagle31.kernels.packed_attention import flash_obstacle

BF16 = torch.bfloat16
CUDA = torch.device("cuda", 0)


def card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    properties = SimpleNamespace(major=capability[0], minor=capability[1], name="a card")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "reason"),
    [
        ((9, 0), BF16, 256, None),
        ((8, 9), BF16, 256, None),
        ((7, 5), torch.float16, 128, "compute capability 8.0"),
        ((9, 0), torch.float32, 128, "not in float32"),
        ((9, 0), BF16, 288, "at most 256"),
        ((8, 9), BF16, 224, "heads of 224"),
        ((12, 0), BF16, 200, "heads of 200"),
    ],
)
def test_the_kernel_is_taken_where_the_card_has_it(
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card(monkeypatch, capability)
    found = flash_obstacle(CUDA, dtype, head_dim)
    assert found is None if reason is None else reason in str(found)
