"""The order of the test files: slow ones first, so that all workers end at about the same time."""

import pytest

# By decreasing time, but first some that do not need vLLM, whose environment takes two minutes where it is
# missing.
SLOW = (
    "tests/train/trainer/test_parallel.py",
    "tests/train/trainer/test_stopping.py",
    "tests/runs/test_kills.py",
    "tests/runs/test_real_target.py",
    "tests/train/engines/test_vllm.py",
    "tests/data/capture/vllm/test_server.py",
    "tests/train/parity/test_vllm_parity.py",
    "tests/train/stages/test_evaluate.py",
    "tests/data/capture/vllm/test_server_process.py",
    "tests/train/plan/test_plan.py",
    "tests/eagle31/kernels/test_compiled.py",
    "tests/data/capture/torchspec/test_transport.py",
    "tests/train/stages/test_continuing.py",
    "tests/train/test_combinations.py",
    "tests/train/test_pipeline.py",
    "tests/train/test_quickstart.py",
    "tests/train/stages/test_inputs.py",
    "tests/train/test_distributed.py",
    "tests/train/config/test_config.py",
    "tests/train/plan/test_memory.py",
    "tests/pretended_gpu/test_validation.py",
    "tests/data/test_supervised.py",
    "tests/train/test_stop.py",
    "tests/pretended_gpu/test_step.py",
    "tests/train/evaluation/test_agreement.py",
    "tests/eagle31/kernels/test_packed_attention.py",
)


def arrange(items: list[pytest.Item]) -> None:
    """Sort collected tests by file; within a file they keep their order."""
    rank = {name: index for index, name in enumerate(SLOW)}
    items.sort(key=lambda item: rank.get(item.nodeid.partition("::")[0], len(rank)))
