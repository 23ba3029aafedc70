"""What servers and clients of the load test share: a small random target, samples, and settings."""

from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from data.store.codec import Encoding
from data.target.parts import load_target_parts
from data.target.spec import TargetSpec
from data.vllm.arguments import CaptureEngine
from data.vllm.client import ExpectedStates

ENCODING = Encoding("exact", "all")
MANIFEST_FIELDS = {"target": "capture_load"}
SHARD_TOKENS = 1000
SPOOL_GB = 0.005
VOCAB_SIZE, MAX_TOKENS, AUX_LAYER_IDS = 1000, 150, (0, 2)
_KV_CACHE_BYTES = 64 << 20


@dataclass(frozen=True)
class LoadSettings:
    """The settings of a client. They reach its process as JSON."""

    work: str  # the directory of everything that the test writes
    urls: list[str]
    num_samples: int
    concurrency: int

    @property
    def stop_file(self) -> Path:
        """The file at whose sight a client ends after its round."""
        return Path(self.work) / "stop"

    @property
    def spec(self) -> TargetSpec:
        return TargetSpec(str(Path(self.work) / "target"))

    @property
    def reference(self) -> Path:
        """The store of an undisturbed capture."""
        return Path(self.work) / "stores" / "reference"

    def client_directory(self, name: str) -> Path:
        """The directory of a client's stores and spools, which servers may write to."""
        return Path(self.work) / "stores" / name


def save_target(spec: TargetSpec) -> None:
    """Write a small Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(spec.model)


def make_samples(num_samples: int) -> Dataset:
    """Return samples of random tokens, 5 to `MAX_TOKENS` each."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, MAX_TOKENS + 1, (num_samples,), generator=generator).tolist()
    ids = [torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_dict(
        {"input_ids": ids, "loss_mask": [[False] * 2 + [True] * (len(i) - 2) for i in ids]}
    )


def capture_engine(spec: TargetSpec, root: Path) -> CaptureEngine:
    """Return the engine of each server, which computes every prompt in full and takes little memory."""
    parts = load_target_parts(spec)
    return CaptureEngine(
        target=spec.model,
        aux_layer_ids=AUX_LAYER_IDS,
        num_layers=parts.num_layers,
        max_tokens=MAX_TOKENS,
        roots=[str(root)],
        dtype="float32",
        target_fingerprint=parts.fingerprint,
        extra={
            "kv_cache_memory_bytes": _KV_CACHE_BYTES,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 16,
            "enable_prefix_caching": False,
        },
    )


def expected_states(spec: TargetSpec) -> ExpectedStates:
    """Return what every server must give."""
    parts = load_target_parts(spec)
    return ExpectedStates(
        spec.model, parts.fingerprint, torch.float32, AUX_LAYER_IDS, parts.hidden_size, parts.num_layers
    )
