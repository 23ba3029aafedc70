"""SGLang's own model classes load exports of its layout, and draft what was trained."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle31.export.layouts import Layout
from eagle31.export.read import load_export
from tests.eagle31.export.exports import LATENT_YARN, LLAMA3, YARN, export
from tests.eagle31.tiny import EAGLE3, MLA, VOCAB, random_batch, tiny_config
from tests.shared import make_cached

WORKER = Path(__file__).with_name("sglang_drafts.py")
# SGLang without the CUDA packages that it requires, and what vLLM's environment lacks of the others.
PACKAGES = ("sglang==0.5.23", "orjson", "ipython", "traitlets", "gguf")
CASES = {
    "llama3_aux_of_1_and_2": {"rope_parameters": LLAMA3, "aux_layer_ids": (1, 2, 5)},
    "eagle3_two_layers": EAGLE3 | {"num_hidden_layers": 2, "aux_layer_ids": (2, 3, 5)},
    "yarn_full_vocabulary": {
        "rope_parameters": YARN | {"original_max_position_embeddings": 8},
        "draft_vocab_size": VOCAB,
        "aux_layer_ids": (2, 5),
    },
    "mla": MLA | {"rope_parameters": LATENT_YARN, "aux_layer_ids": (2, 3, 5)},
}


@pytest.mark.full("installs SGLang and starts it")
def test_sglangs_classes_draft_what_was_trained(vllm_python: Path, tmp_path: Path) -> None:
    def install(directory: Path) -> None:
        pip = [vllm_python, "-m", "pip", "install", "-q", "--no-deps", "--target", directory, *PACKAGES]
        if (done := subprocess.run(pip, capture_output=True, text=True)).returncode:
            pytest.skip(f"SGLang cannot be installed: {done.stderr[-500:]}")

    packages = make_cached(PACKAGES[0], [], install)
    expected = {}
    for name, changes in CASES.items():
        expected[name] = export(tmp_path / name / "export", Layout.sglang, **changes)
        batch = random_batch((24,), tiny_config(**changes), dtype=torch.float32)
        inputs = {"input_ids": batch.input_ids, "positions": batch.position_ids}
        save_file(
            inputs | {"aux": batch.aux_hidden_states.flatten(1)}, tmp_path / name / "inputs.safetensors"
        )
    command = [vllm_python, WORKER, *(tmp_path / name for name in CASES)]
    environment = os.environ | {"PYTHONPATH": str(packages)}
    subprocess.run(command, env=environment, cwd=tmp_path, check=True)
    for name, logits in expected.items():
        found = load_file(tmp_path / name / "drafts.safetensors")
        read = load_export(tmp_path / name / "export", torch.device("cpu"))
        torch.testing.assert_close(found["logits"][..., : logits.shape[-1]], logits, atol=1e-4, rtol=0)
        if read.draft_target_ids is not None:
            assert torch.equal(found["d2t"], read.draft_target_ids)
        ids = list(read.drafter.config.aux_layer_ids)
        assert found["llama"].tolist() == ids
        # It adds one for targets of this family only where the first of its ids is one.
        assert (found["deepseek"].tolist() == ids) == (ids[0] == 2)
