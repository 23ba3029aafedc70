"""What the soak trains on: a small target, its conversations, and the settings of the run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.embedded.corpus import standard_library
from data.embedded.target import EmbeddedTarget, TargetSettings, ensure_embedded_target
from data.embedded.training import TrainingSettings

_TARGET = TargetSettings(
    vocab_size=512,
    hidden_size=64,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=128,
    max_positions=512,
    training=TrainingSettings(steps=80, batch_tokens=1024, max_document_tokens=256),
)
_KV_CACHE_BYTES = 64 << 20
_SPOOL_GB = 0.2  # the states of twenty seconds of training on two fast cores
_ENDLESS_STEPS = 100_000_000
# By the value of `capture.source`.
SOURCES = {
    "hf": ("capture=hf_online", "capture.processes=2"),
    "vllm": (
        "capture=vllm_online",
        f"vllm.engine_args={{kv_cache_memory_bytes: {_KV_CACHE_BYTES}, max_num_seqs: 16}}",
    ),
}


@dataclass(frozen=True)
class SoakRuns:
    """The commands of the soak, all of them on the same target and data."""

    work: Path
    target: EmbeddedTarget

    @property
    def output(self) -> Path:
        return self.work / "run"

    @property
    def spools(self) -> Path:
        return self.work / "spools"

    @property
    def records(self) -> Path:
        """A line for each time that training has read samples."""
        return self.work / "records.jsonl"

    def reference(self) -> list[str]:
        """Return the settings of an offline capture of the same samples, which nobody disturbs."""
        directory = self.work / "reference"
        return [*self._settings(directory), "stages=[data,vocab,answers,capture]"]

    def training(self, source: str, servers: Sequence[str] = ()) -> list[str]:
        """Return the settings of the training, which ends when it gets SIGTERM.

        Args:
            servers: the addresses of its vLLM servers.
        """
        stages = "stages=[data,vocab,answers,capture,train]"
        return [*self.serving(source), f"vllm.servers=[{','.join(servers)}]", stages]

    def serving(self, source: str) -> list[str]:
        """Return the settings of what runs the target for the training."""
        transport = [f"capture.spool_dir={self.spools}", f"capture.spool_gb={_SPOOL_GB}"]
        return [*self._settings(self.output), *SOURCES[source], *transport]

    def _settings(self, output: Path) -> list[str]:
        return [
            "recipe=any_target",
            f"target.model={self.target.model}",
            f"data.train={self.target.train}",
            f"output_dir={output}",
            "data.num_validation=8",
            "data.num_test=6",
            "data.max_tokens=256",
            "data.num_workers=1",
            "drafter.draft_vocab_size=300",
            "capture.codec=exact",
            "train.row_tokens=256",
            "train.rows_per_step=4",
            f"train.max_steps={_ENDLESS_STEPS}",
            "train.log_every=1",
            "train.validate_every=500",
            "train.save_every=500",
            "train.diagnose_every=500",
            "train.ttt_steps=3",
            "optim.lr=1e-3",
            "deepspeed.precision=fp32",
            "evaluate.max_new_tokens=32",
            "tracking.mode=disabled",
        ]


def make_runs(work: Path) -> SoakRuns:
    """Train the small target, and return the commands."""
    source = standard_library() / "email"
    target = ensure_embedded_target(work / "target", source=source, settings=_TARGET, progress=False)
    runs = SoakRuns(work, target)
    runs.spools.mkdir(parents=True, exist_ok=True)
    return runs
