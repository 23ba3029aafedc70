"""Which TorchSpec runs which target: its settings, and what its environment must hold."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data.transport.mooncake import MooncakeSettings
from eagle31.errors import UserError

REVISION = "6f21829"
# Of the files that torchspec_bridge.py lists, at that revision.
INTERFACE_SHA256 = "6b6d59d1620fd574ef0ee81d3013c6f21cfab62ad90c8c6539fe564fa6ecf30d"
DTYPE = torch.bfloat16  # HIDDEN_STATES_STORAGE_DTYPE in TorchSpec

_BRIDGE = Path(__file__).with_name("bridge.py")
_PYTHON = "capture.torchspec.python"
_OVERRIDES = "capture.torchspec.overrides"
_INSTALL = (
    f"Clone github.com/lightseekorg/TorchSpec, check out {REVISION}, and in an environment with transformers "
    "4.57 run: pip install --editable PATH."
)
_PROBE_SECONDS = 60.0


@dataclass(frozen=True)
class TorchSpecSettings:
    """Which TorchSpec, and what its engines run; `capture.torchspec` in the recipe."""

    python: str  # of the environment that TorchSpec is installed in
    target: str  # a local directory or a hub id
    aux_layer_ids: tuple[int, ...]  # as in the drafter's config
    num_layers: int
    hidden_size: int
    max_tokens: int  # of the longest sample
    mooncake: MooncakeSettings
    rope_parameters: Mapping[str, Any]  # the target's, as its config has them in transformers 5
    overrides: tuple[str, ...] = ()  # TorchSpec's own settings, key=value
    trust_remote_code: bool = False
    start_seconds: float = 1800.0  # to load the target

    @property
    def engine(self) -> str:
        """hf, sgl or vllm."""
        chosen = [
            o.partition("=")[2] for o in self.overrides if o.startswith("inference.inference_engine_type=")
        ]
        return chosen[-1] if chosen else "hf"

    def arguments(self) -> list[str]:
        """TorchSpec's settings for these, behind the user's own.

        Raises:
            UserError: the user sets one of them otherwise, no engine of TorchSpec captures these layers, or
                there is no metadata server.
        """
        if not self.mooncake.metadata.startswith("http"):
            remedy = (
                "TorchSpec needs a metadata server: start mooncake_master with "
                "--enable_http_metadata_server=true --http_metadata_server_port=8080, and give "
                "http://HOST:8080/metadata."
            )
            raise UserError("capture.mooncake.metadata", self.mooncake.metadata, remedy)
        own = {
            "model.target_model_path": os.path.abspath(self.target)
            if Path(self.target).exists()
            else self.target,
            "model.trust_remote_code": self.trust_remote_code,
            "training.max_seq_length": self.max_tokens,
            "training.training_num_nodes": 0,
            "debug.debug_inference_only": True,
            "inference.aux_hidden_states_layers": list(self.engine_layer_ids()),
            "inference.store_last_hidden_states": True,
            "mooncake.master_server_address": self.mooncake.master,
            "mooncake.metadata_server": self.mooncake.metadata,
            "mooncake.protocol": self.mooncake.protocol,
            "mooncake.device_name": self.mooncake.device,
            "mooncake.global_segment_size": self.mooncake.segment_bytes,
            "mooncake.host_buffer_size": self._sample_bytes(),
            # Mooncake evicts what is not pinned when memory runs out, read or not.
            "mooncake.enable_hard_pin": True,
        }
        for override in self.overrides:
            name, _, value = override.partition("=")
            if not value:
                raise UserError(_OVERRIDES, override, "Give it as key=value.")
            if name in own:
                raise UserError(
                    _OVERRIDES, override, "Follows from the recipe's other settings; leave it out."
                )
        defaults = ["inference.inference_num_gpus=1", "inference.inference_num_gpus_per_node=1"]
        return [*defaults, *self.overrides, *(f"{name}={json.dumps(value)}" for name, value in own.items())]

    def engine_layer_ids(self) -> tuple[int, ...]:
        """TorchSpec counts outputs of layers: our id i is the output of its layer i - 1.

        Raises:
            UserError: no layer puts out what an id stands for, or the engine cannot reach it.
        """
        highest = self.num_layers if self.engine == "hf" else self.num_layers - 1
        for layer_id in self.aux_layer_ids:
            if not 1 <= layer_id <= highest:
                remedy = f"TorchSpec's engine {self.engine} captures ids 1 to {highest}; choose among them."
                raise UserError("drafter.aux_layer_ids", list(self.aux_layer_ids), remedy)
        return tuple(layer_id - 1 for layer_id in self.aux_layer_ids)

    def _sample_bytes(self) -> int:
        states = (len(self.aux_layer_ids) + 1) * self.hidden_size * DTYPE.itemsize
        return self.max_tokens * (states + torch.int64.itemsize)


def bridge_command(python: str) -> list[str]:
    """Return the command that runs the bridge in TorchSpec's environment."""
    # With -P the files next to the bridge are not importable there.
    return [python, "-P", str(_BRIDGE)]


def check_torchspec(python: str) -> None:
    """Looks at the environment before anything is started in it.

    Raises:
        UserError: what is missing or wrong there, and the remedy.
    """
    found = _probe(python)
    versions, place = found["versions"], found["torchspec"]
    if place is None:
        raise UserError(_PYTHON, python, f"TorchSpec is not installed there. {_INSTALL}")
    if not found["complete"]:
        what = f"torchspec {versions['torchspec']} in {place} is not whole"
        remedy = (
            f"{what}: PyPI's is an empty reservation of the name, and a wheel holds two files. {_INSTALL}"
        )
        raise UserError(_PYTHON, python, remedy)
    if int((versions["transformers"] or "0").partition(".")[0]) >= 5:
        remedy = (
            f"transformers {versions['transformers']} there breaks TorchSpec, which loses rope_theta without "
            "a word: pip install 'transformers>=4.57,<5'."
        )
        raise UserError(_PYTHON, python, remedy)
    for name in ("torch", "ray", "omegaconf", "mooncake", "transformers"):
        if versions[name] is None:
            remedy = f"{name} is missing there: install what TorchSpec's pyproject.toml asks for."
            raise UserError(_PYTHON, python, remedy)
    if found["interface"] != INTERFACE_SHA256:
        remedy = (
            f"TorchSpec in {place} is at revision {found['revision'] or 'unknown'}, where its engines or "
            f"store differ from {REVISION}, which eagle31 was tried with: git -C {place} checkout {REVISION}."
        )
        raise UserError(_PYTHON, python, remedy)


def _probe(python: str) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [*bridge_command(python), "--probe"],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=True,
        )
    except OSError as error:
        raise UserError(_PYTHON, python, f"Cannot be run ({error.strerror}). {_INSTALL}") from error
    except subprocess.SubprocessError as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        remedy = f"Is no Python that TorchSpec runs in, 3.11 or newer ({detail}). {_INSTALL}"
        raise UserError(_PYTHON, python, remedy) from error
    return json.loads(done.stdout)
