"""TorchSpec's settings for a target, and the checks of its environment."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data.transport.mooncake_store import MooncakeSettings
from eagle31.errors import UserError

REVISION = "6f21829"
# The checksum of the files that bridge.py lists, at that revision.
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
    """A TorchSpec environment and the target of its engines; `capture.torchspec` in the recipe."""

    python: str  # the Python of TorchSpec's environment
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
        """The type of the inference engine: hf, sgl or vllm."""
        chosen = [
            o.partition("=")[2] for o in self.overrides if o.startswith("inference.inference_engine_type=")
        ]
        return chosen[-1] if chosen else "hf"

    def arguments(self) -> list[str]:
        """Return TorchSpec's settings: the user's, then those that follow from this object.

        Raises:
            UserError: the user sets one of the latter, TorchSpec's engine cannot capture these layers, or
            there
                is no metadata server.
        """
        if not self.mooncake.metadata.startswith("http"):
            remedy = (
                "TorchSpec needs a metadata server: start mooncake_master with "
                "--enable_http_metadata_server=true --http_metadata_server_port=8080, and give "
                "http://HOST:8080/metadata."
            )
            raise UserError("capture.mooncake.metadata", self.mooncake.metadata, remedy)
        derived = {
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
            if name in derived:
                raise UserError(
                    _OVERRIDES, override, "It follows from the recipe's other settings; leave it out."
                )
        defaults = ["inference.inference_num_gpus=1", "inference.inference_num_gpus_per_node=1"]
        return [
            *defaults,
            *self.overrides,
            *(f"{name}={json.dumps(value)}" for name, value in derived.items()),
        ]

    def engine_layer_ids(self) -> tuple[int, ...]:
        """Return TorchSpec's layer ids, which count layer outputs: our id i is the output of its layer i - 1.

        Raises:
            UserError: an id is no layer's output, or the engine cannot capture it.
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
    """Check TorchSpec's environment before anything is started in it.

    Raises:
        UserError: something is missing or wrong.
    """
    found = _probe(python)
    versions, directory = found["versions"], found["torchspec"]
    if directory is None:
        raise UserError(_PYTHON, python, f"TorchSpec is not installed there. {_INSTALL}")
    if not found["complete"]:
        what = f"torchspec {versions['torchspec']} in {directory} is incomplete"
        remedy = (
            f"{what}: PyPI's is an empty reservation of the name, and a wheel holds two files. {_INSTALL}"
        )
        raise UserError(_PYTHON, python, remedy)
    if int((versions["transformers"] or "0").partition(".")[0]) >= 5:
        remedy = (
            f"transformers {versions['transformers']} there breaks TorchSpec, which silently loses "
            "rope_theta: pip install 'transformers>=4.57,<5'."
        )
        raise UserError(_PYTHON, python, remedy)
    for name in ("torch", "ray", "omegaconf", "mooncake", "transformers"):
        if versions[name] is None:
            remedy = f"{name} is missing there: install the requirements in TorchSpec's pyproject.toml."
            raise UserError(_PYTHON, python, remedy)
    if found["interface"] != INTERFACE_SHA256:
        remedy = (
            f"TorchSpec in {directory} is at revision {found['revision'] or 'unknown'}, where its engines or "
            f"store differ from {REVISION}, which eagle31 was tested with: "
            f"git -C {directory} checkout {REVISION}."
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
        raise UserError(_PYTHON, python, f"It cannot be run ({error.strerror}). {_INSTALL}") from error
    except subprocess.SubprocessError as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        remedy = f"It is no Python 3.11 or newer, which TorchSpec needs ({detail}). {_INSTALL}"
        raise UserError(_PYTHON, python, remedy) from error
    return json.loads(done.stdout)
