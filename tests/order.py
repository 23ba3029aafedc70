"""The order of the test files: slow ones first, so that all workers end at about the same time."""

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

# By decreasing time, except that files come first that others depend on. Those that need vLLM come in the
# middle: its environment takes two minutes where it is missing.
SLOW = (
    "tests/train/launch/test_nodes.py",
    "tests/train/engines/test_torchspec.py",
    "tests/runs/test_kills.py",
    "tests/train/trainer/test_parallel.py",
    "tests/train/stages/training/test_continuing.py",
    "tests/train/test_pipeline.py",
    "tests/train/test_stop.py",
    "tests/train/trainer/test_elastic.py",
    "tests/train/parity/test_vllm_parity.py",
    "tests/train/launch/test_apart.py",
    "tests/data/capture/transport/test_mooncake.py",
    "tests/train/stages/test_given_store.py",
    "tests/data/capture/vllm/test_server.py",
    "tests/train/engines/test_vllm.py",
    "tests/train/stages/test_evaluate.py",
    "tests/runs/test_real_target.py",
    "tests/train/test_combinations.py",
    "tests/train/plan/test_memory.py",
    "tests/data/capture/vllm/test_server_process.py",
    "tests/train/test_quickstart.py",
    "tests/data/test_supervised.py",
    "tests/bad_input/test_machines.py",
    "tests/bad_input/test_results.py",
    "tests/train/stages/test_inputs.py",
    "tests/train/plan/test_plan.py",
    "tests/pretended_gpu/test_step.py",
    "tests/pretended_gpu/test_loop.py",
    "tests/scripts/test_serve_target.py",
    "tests/data/generation/test_hf.py",
    "tests/eagle31/decoding/test_speculative.py",
    "tests/eagle31/kernels/test_compiled.py",
    "tests/train/report/test_report.py",
    "tests/bad_input/test_templates.py",
    "tests/train/launch/test_submit.py",
)


def arrange(items: list[pytest.Item]) -> None:
    """Sort collected tests by file; within a file they keep their order."""
    rank = {name: index for index, name in enumerate(SLOW)}
    items.sort(key=lambda item: rank.get(file_of(item), len(rank)))


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


class QuickAfterSlow(LoadFileScheduling):
    """Gives each worker whole files. While a slow one runs there, the file that waits for it is a quick one.

    A worker gets its next file before the last two tests of the one that it has.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        assigned = self.assigned_work.get(node, {})
        if any(name in SLOW and not all(done.values()) for name, done in assigned.items()):
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)
