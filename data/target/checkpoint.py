"""A safetensors checkpoint, local or on the hub: reading single tensors, and a fingerprint of its weights."""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils.hub import cached_file, extract_commit_hash

from data.file_hashes import hash_files
from data.hub import check_hub
from eagle31.errors import UserError
from eagle31.json_files import file_within, read_json
from eagle31.tensor_files import check_pointer, load_tensors, read_header

_SINGLE_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FILES_PREFIX = "files:"
# transformers and vLLM read nothing else of a directory but the tokenizer.
_COMPUTING_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "params.json",  # of Mistral's format
    "adapter_config.json",
    "*quant*.json",  # hf_quant_config.json, quantize_config.json and others
    "*.py",
)
_LAYER = re.compile(r"(?:model\.|language_model\.)*layers\.(\d+)\.")
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


@dataclass(frozen=True)
class Checkpoint:
    """A model's directory or hub id; only the requested files of a hub checkpoint are downloaded."""

    model: str
    revision: str | None = None

    def __post_init__(self) -> None:
        looks_local = self.model.startswith(("/", ".", "~")) or self.model.count("/") > 1
        if looks_local and not os.path.isdir(self.path):
            remedy = "There is no such directory; give a directory or a hub id."
            raise UserError("target.model", self.model, remedy)

    @property
    def path(self) -> str:
        return os.path.expanduser(self.model)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Raise the errors of transformers about a model as a UserError.

        The causes are a missing repository or file, no network, an unknown architecture, a missing package,
        and a damaged file, which is named.
        """
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            self.check_files(texts=True)
            reason = " ".join(str(error).split())
            if isinstance(error, StrictDataclassError):
                config = f"{self.path}/config.json"
                remedy = f"transformers refuses it: {reason}; correct it, or download it again."
                raise UserError("target.model", config, remedy) from error
            if not isinstance(error, OSError | ValueError | ImportError):
                raise
            raise UserError("target.model", self.model, f"The model cannot be loaded: {reason}") from error

    def find_file(self, name: str, local: bool = False) -> Path | None:
        """Return the file's path, or None if it does not exist; download it if needed, unless `local`."""
        if not local and not os.path.isdir(self.path):
            check_hub("target.model", self.model, "model")
        with self.loading():
            found = cached_file(
                self.path,
                name,
                revision=self.revision,
                local_files_only=local,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=not local,
            )
        return None if found is None else Path(found)

    def tensor_files(self) -> Mapping[str, str]:
        """Return the file name of each tensor by the tensor's name.

        Raises:
            UserError: the checkpoint is not in the safetensors format.
        """
        index = self.find_file(_INDEX_FILE)
        if index is not None:
            return _weight_map(index)
        single = self.find_file(_SINGLE_FILE)
        if single is None:
            remedy = f"It has neither {_SINGLE_FILE} nor {_INDEX_FILE}; convert its weights to safetensors."
            raise UserError("target.model", self.model, remedy)
        return dict.fromkeys(load_tensors(single), _SINGLE_FILE)

    def has_mtp_head(self, num_layers: int) -> bool:
        """Return whether a target of this many layers has weights for multi-token prediction, too.

        They are named after it (`mtp.`, `model.mtp_layers.0.`), or are the layers after its last one.
        """
        names = self.tensor_files()
        layers = (int(found[1]) for found in map(_LAYER.match, names) if found)
        return any("mtp" in name for name in names) or max(layers, default=0) >= num_layers

    def read_tensor(self, file_name: str, name: str) -> Tensor:
        """Read one tensor in its stored dtype.

        Raises:
            UserError: the file is missing, or the tensor is quantized: its values are not the weights.
        """
        path = self.find_file(file_name)
        if path is None:
            raise UserError(
                "target.model", self.model, f"The file {file_name} with the tensor {name} is missing."
            )
        tensor = load_tensors(path).get(name)
        if tensor is None:
            remedy = f"The file has no tensor {name}, which the index has there; download it again."
            raise UserError("target.model", path, remedy)
        if tensor.dtype not in _PLAIN_DTYPES:
            remedy = f"{name} is {tensor.dtype}: a weight that is read alone must not be quantized."
            raise UserError("target.model", self.model, remedy)
        return tensor

    def fingerprint(self) -> str:
        """Return what identifies the model: a hub model's commit, or a hash of a local directory's files.

        The hash covers the whole content of every file that affects what the model computes: weights,
        configuration and code. It does not cover the tokenizer, which has its own fingerprint.
        """
        if not os.path.isdir(self.path):
            config = self.find_file("config.json")
            commit = extract_commit_hash(None if config is None else str(config), None)
            if commit is None:
                raise UserError("target.model", self.model, "The hub repository has no config.json.")
            return commit
        self.check_files()
        files = self._computing_files()
        digest = hashlib.sha256()
        for file, content in zip(files, hash_files(files), strict=True):
            digest.update(f"{file.name} {content}\n".encode())
        return f"{_FILES_PREFIX}{digest.hexdigest()}"

    def check_files(self, *, texts: bool = False) -> None:
        """Raise UserError for a damaged file in a local directory; of the weights only headers are read.

        Args:
            texts: JSON files are read as well.
        """
        directory = Path(self.path)
        if not directory.is_dir():
            return
        for file in sorted(directory.iterdir()):
            if file.is_file():
                check_pointer(file)
                if texts and file.suffix == ".json":
                    read_model_json(file)
        for file in self._computing_files():
            if file.suffix == ".safetensors":
                with file.open("rb") as opened:
                    read_header(opened, file)

    def _computing_files(self) -> list[Path]:
        """Return the files of a local directory that affect what the model computes, by name."""
        directory = Path(self.path)
        files = {file for pattern in _COMPUTING_FILES for file in directory.glob(pattern)}
        if not any(file.suffix == ".safetensors" for file in files):  # a drafter's, see drafter.init_from
            files |= set(directory.glob("pytorch_model*.bin"))
        for index in directory.glob("*.safetensors.index.json"):
            shards = _weight_map(index).values()
            files |= {directory / shard for shard in shards if (directory / shard).exists()}
        return sorted(files)


def _weight_map(index: Path) -> Mapping[str, str]:
    content = read_model_json(index)
    if not isinstance(content, dict) or not isinstance(content.get("weight_map"), dict):
        raise UserError("target.model", index, "The file has no weight_map; download it again.")
    for name in content["weight_map"].values():
        file_within(index.parent, name, index)
    return content["weight_map"]


def read_model_json(file: Path) -> object:
    """Return the content of a model's JSON file. Raise UserError if it is damaged."""
    try:
        return read_json(file)
    except ValueError:
        remedy = "The file is truncated or no JSON; download it again."
        raise UserError("target.model", file, remedy) from None


def comparable_fingerprints(one: str, other: str) -> bool:
    """Whether two fingerprints are of the same kind: of a commit each, or of files each."""
    return one.startswith(_FILES_PREFIX) == other.startswith(_FILES_PREFIX) and len(one) == len(other)


def is_hub_id(name: str) -> bool:
    """Whether `name` reads as `owner/name` and is not a local file or directory."""
    return _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def read_modules(
    checkpoint: Checkpoint, model: PreTrainedModel, modules: Iterable[nn.Module]
) -> list[dict[str, Tensor]]:
    """Read the state dicts of some of a model's modules; a tied embedding is read from where it is stored.

    Args:
        model: the modules' owner, for their names; may be on the meta device.

    Raises:
        UserError: the checkpoint lacks one of the tensors, or has it quantized.
    """
    paths = {module: path for path, module in model.named_modules()}
    files = checkpoint.tensor_files()
    names = _StoredNames(model, files)
    states = []
    for module in modules:
        stored = {key: names.find(f"{paths[module]}.{key}") for key in module.state_dict()}
        for key, name in stored.items():
            if name is None:
                similar = [one for one in files if one.startswith(f"{paths[module]}.")]
                remedy = f"The checkpoint has no tensor {paths[module]}.{key}" + (
                    f" but {', '.join(similar)}: a weight that is read alone must not be quantized."
                    if similar
                    else ": a file or its index is incomplete; download it again."
                )
                raise UserError("target.model", checkpoint.model, remedy)
        states.append({k: checkpoint.read_tensor(files[name], name) for k, name in stored.items() if name})
    return states


class _StoredNames:
    """The names of a model's parameters in its checkpoint."""

    def __init__(self, model: PreTrainedModel, stored: Iterable[str]) -> None:
        self.model = model
        self.stored = frozenset(stored)
        self.tied = model.get_expanded_tied_weights_keys(all_submodels=True)
        self._renamed: dict[str, str] | None = None

    def find(self, name: str) -> str | None:
        options = [name, self.tied[name]] if name in self.tied else [name]
        for option in options:
            if option in self.stored:
                return option
        # The last resort, because it visits every tensor of the checkpoint.
        self._renamed = self._renamed if self._renamed is not None else self._renames()
        return next((self._renamed[option] for option in options if option in self._renamed), None)

    def _renames(self) -> dict[str, str]:
        """Map parameters to stored names as transformers does when it loads older layouts."""
        conversions = get_model_conversion_mapping(self.model)
        renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        converters = [c for c in conversions if isinstance(c, WeightConverter)]
        prefix, state = self.model.base_model_prefix, self.model.state_dict()
        return {
            rename_source_key(name, renamings, converters, prefix, state)[0]: name
            for name in sorted(self.stored)
        }
