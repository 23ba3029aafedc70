"""What we use of TorchSpec: a change there fails with the name of what has changed."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from data.capture.torchspec.engines import TorchSpecSettings
from data.capture.transport.mooncake_store import load_mooncake
from data.capture.vllm.environment import ROOT
from tests.data.capture.transport.mooncake_master import running_master
from tests.data.capture.transport.mooncake_worker import open_transport, sample

pytestmark = pytest.mark.usefixtures("torchspec")

# What is called through a handle of Ray, which has no signature.
REMOTE = {
    "generate": ["data_id", "input_ids_ref", "packed_loss_mask_list"],
    "health_check": [],
}


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the names that a file has TorchSpec's modules, classes and functions by, and their paths."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def resolved(path: str) -> Any:
    """Return the module, class, function or method at a dotted path."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        parent, _, name = path.rpartition(".")
        return getattr(resolved(parent), name)


def problems(tree: ast.AST) -> Iterator[str]:
    """Yield what a file takes from TorchSpec or passes to it, and TorchSpec does not have."""
    names = {name: path for name, path in imports(tree) if path.partition(".")[0] == "torchspec"}
    for path in names.values():
        try:
            resolved(path)
        except (ImportError, AttributeError) as error:
            yield f"{path}: {error}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        first, dot, rest = called.partition(".")
        if first not in names:
            continue
        path = names[first] + dot + rest
        try:
            signature = inspect.signature(resolved(path))
            arguments = [None for one in node.args if not isinstance(one, ast.Starred)]
            keywords = {one.arg: None for one in node.keywords if one.arg}
            whole = len(arguments) == len(node.args) and len(keywords) == len(node.keywords)
            (signature.bind if whole else signature.bind_partial)(*arguments, **keywords)
        except (AttributeError, TypeError) as error:
            yield f"{path}: {error}"


def test_what_our_code_imports_and_calls_is_there() -> None:
    load_mooncake()  # which TorchSpec's modules import
    files = [path for folder in ("data", "train", "scripts") for path in (ROOT / folder).rglob("*.py")]
    trees = {path: ast.parse(path.read_text()) for path in files if "torchspec" in path.read_text()}
    assert trees
    found = []
    for path, tree in trees.items():
        shared = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        # One by one: two classes may import different things by one name.
        parts = (ast.Module([*shared, node], []) for node in tree.body)
        found += [f"{path}: {one}" for part in parts for one in problems(part)]
    assert found == []


def test_the_settings_of_a_run_arrive() -> None:
    """Its configuration has some as a dictionary, in which nothing checks names."""
    load_mooncake()
    from torchspec.config.mooncake_config import MooncakeConfig

    sizes: dict[str, Any] = {"num_layers": 8, "hidden_size": 64, "max_tokens": 100, "gpus_per_engine": 4}
    settings = TorchSpecSettings(
        "sgl",
        num_engines=1,
        target="a/b",
        trust_remote_code=False,
        aux_layer_ids=(2, 4, 5),
        protocol="rdma",
        device="mlx5_0",
        **sizes,
    )
    arguments = settings.arguments()
    assert arguments.aux_hidden_states_layers == [1, 3, 4]
    assert (arguments.inference_num_gpus, arguments.inference_num_gpus_per_engine) == (4, 4)
    arguments.mooncake_master_server_address = "host:1"
    store = MooncakeConfig.from_flat_args(arguments)
    assert (store.protocol, store.device_name, store.hidden_dim) == ("rdma", "mlx5_0", 64)
    assert (store.master_server_address, store.global_segment_size) == ("host:1", 0)


@pytest.mark.parametrize("engine", ["base.InferenceEngine", "hf_engine.HFEngine", "vllm_engine.VllmEngine"])
def test_engines_take_what_they_are_given(engine: str) -> None:
    load_mooncake()
    for method, names in REMOTE.items():
        path = f"torchspec.inference.engine.{engine}.{method}"
        signature = inspect.signature(resolved(path))
        missing = [name for name in names if name not in signature.parameters]
        assert not missing, f"{path} has no {missing}"
        signature.bind(None, **dict.fromkeys(names))


def test_what_its_store_puts_is_what_ours_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_mooncake()
    from torchspec.config.mooncake_config import MooncakeConfig
    from torchspec.transfer.mooncake.eagle_store import EagleMooncakeStore

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options))
    request, aux, final = sample(0, 40)
    with running_master(tmp_path) as master:
        config = MooncakeConfig(
            local_hostname="127.0.0.1",
            metadata_server="P2PHANDSHAKE",
            master_server_address=master.address,
            protocol="tcp",
            global_segment_size=16 << 20,
            local_buffer_size=1 << 20,
            host_buffer_size=1 << 20,
            enable_gpu_direct=False,
        )
        store = EagleMooncakeStore(config)
        store.setup("cpu")
        stored = store.put(
            key=request.key,
            hidden_states=aux.flatten(1)[None],
            target=None,
            input_ids=request.input_ids[None],
            last_hidden_states=final[None],
        )
        store.flush()
        assert set(stored["dtypes"].values()) == {torch.bfloat16, torch.int64}
        with closing(open_transport(master.settings())) as transport:
            taken = transport.take(request, 20.0)
        store.close()
    assert taken is not None
    assert taken.aux_hidden_states.equal(aux)
    assert taken.final_hidden_states.equal(final)
