import pytest

from eagle31.cost.devices import peak_bf16_flops


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 2080", None),
    ],
)
def test_the_peak_rate_is_that_of_the_most_specific_name(name: str, expected: float | None) -> None:
    assert peak_bf16_flops(name) == expected
