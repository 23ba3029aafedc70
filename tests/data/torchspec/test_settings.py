import shutil
import site
import subprocess
import sys
import venv
from dataclasses import replace
from pathlib import Path

import pytest

from data.torchspec.settings import TorchSpecSettings, check_torchspec
from data.transport.mooncake_store import MooncakeSettings
from eagle31.errors import UserError
from tests.torchspec_python import torchspec_python

SETTINGS = TorchSpecSettings(
    python=sys.executable,
    target="Qwen/Qwen3-8B",
    aux_layer_ids=(2, 18, 33),
    num_layers=36,
    hidden_size=4096,
    max_tokens=2048,
    mooncake=MooncakeSettings(metadata="http://127.0.0.1:8080/metadata"),
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)


def test_layer_ids_are_those_of_torchspec() -> None:
    # Its own defaults for the 36 layers of Qwen3-8B: 1, n // 2 - 1, n - 4 (torchspec/utils/misc.py).
    assert SETTINGS.engine_layer_ids() == (1, 17, 32)
    assert "inference.aux_hidden_states_layers=[1, 17, 32]" in SETTINGS.arguments()
    # The last layer's output, which only its hf engine returns next to the final state.
    last = replace(SETTINGS, aux_layer_ids=(2, 36))
    assert last.engine_layer_ids() == (1, 35)
    for engine in ("sgl", "vllm"):
        other = replace(last, overrides=(f"inference.inference_engine_type={engine}",))
        with pytest.raises(UserError, match=f"engine {engine} captures ids 1 to 35"):
            other.arguments()
    with pytest.raises(UserError, match="captures ids 1 to 36"):
        replace(SETTINGS, aux_layer_ids=(0, 2)).arguments()


def test_the_users_settings_are_kept_and_cannot_contradict_the_recipe() -> None:
    chosen = "inference.inference_num_gpus=8"
    arguments = replace(SETTINGS, overrides=(chosen,)).arguments()
    assert arguments.index(chosen) > arguments.index("inference.inference_num_gpus=1")
    for override in ("inference.aux_hidden_states_layers=[1]", "mooncake.enable_hard_pin=false"):
        with pytest.raises(UserError, match="leave it out"):
            replace(SETTINGS, overrides=(override,)).arguments()
    with pytest.raises(UserError, match="key=value"):
        replace(SETTINGS, overrides=("inference_num_gpus",)).arguments()
    with pytest.raises(UserError, match=r"capture\.mooncake\.metadata"):
        replace(SETTINGS, mooncake=MooncakeSettings()).arguments()


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Make an empty environment and return its Python."""
    venv.create(tmp_path / "environment", symlinks=True)
    return tmp_path / "environment" / "bin" / "python"


def packages(python: Path) -> Path:
    (directory,) = (python.parents[1] / "lib").glob("python*/site-packages")
    return directory


def refusal(python: Path | str) -> str:
    with pytest.raises(UserError, match=r"capture\.torchspec\.python") as caught:
        check_torchspec(str(python))
    return caught.value.remedy


def test_a_python_without_torchspec_is_refused(environment: Path, tmp_path: Path) -> None:
    assert "TorchSpec is not installed there" in refusal(environment)
    assert "cannot be run" in refusal(tmp_path / "none")
    assert "is no Python" in refusal(shutil.which("false") or "false")


def test_the_empty_torchspec_of_pypi_is_refused(environment: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--python", environment, "install", "--no-deps", "torchspec"]
    installed = subprocess.run(pip, capture_output=True, text=True, timeout=240)
    if installed.returncode != 0:
        pytest.skip(f"torchspec cannot be had from PyPI: {installed.stderr.splitlines()[-1]}")
    assert "empty reservation" in refusal(environment)


def torchspec_root() -> Path:
    code = "import importlib.util as u; print(u.find_spec('torchspec').submodule_search_locations[0])"
    done = subprocess.run(
        [torchspec_python(), "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    return Path(done.stdout.strip())


def test_what_is_wrong_around_a_real_torchspec_is_named(environment: Path, tmp_path: Path) -> None:
    check_torchspec(torchspec_python())
    (packages(environment) / "torchspec.pth").write_text(f"{torchspec_root().parent}\n")
    assert "torch is missing there" in refusal(environment)
    # This environment has transformers 5.
    (packages(environment) / "here.pth").write_text("\n".join(site.getsitepackages()))
    assert "transformers 5" in refusal(environment)


def test_a_revision_that_was_never_tried_is_refused(environment: Path, tmp_path: Path) -> None:
    theirs = packages(Path(torchspec_python()))
    copy = tmp_path / "checkout" / "torchspec"
    shutil.copytree(torchspec_root(), copy)
    (packages(environment) / "all.pth").write_text(f"{copy.parent}\n{theirs}\n")
    check_torchspec(str(environment))
    with (copy / "transfer" / "mooncake" / "eagle_store.py").open("a") as file:
        file.write("# later\n")
    assert "differ from 6f21829" in refusal(environment)
