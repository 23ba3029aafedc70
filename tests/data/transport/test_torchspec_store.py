"""The store's format, compared with TorchSpec's own code in both directions."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from data.transport.mooncake_store import library_directory
from tests.data.torchspec.ray_node import ON_CPU
from tests.data.transport.mooncake_master import running_master
from tests.data.transport.mooncake_worker import HIDDEN_SIZE, NUM_AUX_LAYERS, open_transport, sample
from tests.torchspec_python import run_there, torchspec_python

SCRIPT, NUM_TOKENS = Path(__file__).with_name("torchspec_store.py"), 40


def test_torchspecs_store_reads_ours_and_we_read_its(tmp_path: Path) -> None:
    torchspec_python()
    with running_master(tmp_path) as master:
        ours = open_transport(replace(master.settings(16 << 20), metadata=master.metadata))
        request, aux, last = sample(0, NUM_TOKENS)
        ours.put(replace(request, key="ours"), aux, last)
        shape = [str(number) for number in (NUM_AUX_LAYERS, HIDDEN_SIZE, NUM_TOKENS)]
        run_there(
            SCRIPT,
            [master.address, master.metadata, *shape, tmp_path / "taken.safetensors"],
            PYTHONPATH=str(ON_CPU),
            LD_LIBRARY_PATH=str(library_directory()),
        )
        taken = load_file(tmp_path / "taken.safetensors")
        assert taken["hidden_states"].equal(aux.flatten(1))
        assert taken["last_hidden_states"].equal(last)
        assert taken["input_ids"].equal(request.input_ids)
        assert not ours.arrived("ours")
        found = ours.take(replace(request, key="theirs"), 10.0)
        assert found is not None
        assert found.aux_hidden_states.dtype == torch.bfloat16
        assert found.aux_hidden_states.equal(aux)
        assert found.final_hidden_states.equal(last)
        ours.close()
