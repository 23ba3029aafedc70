"""TorchSpec gets a run's settings, and what its store puts is what ours takes."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from data.capture.torchspec.engines import TorchSpecSettings
from data.capture.torchspec.mooncake import load_mooncake
from tests.data.capture.torchspec.mooncake_master import open_transport, running_master, sample
from tests.data.capture.torchspec.test_engines import SIZE, captured

pytestmark = pytest.mark.usefixtures("torchspec")


def test_the_settings_of_a_run_arrive() -> None:
    """Its configuration has some as a dictionary, in which nothing checks names."""
    load_mooncake()
    from torchspec.config.mooncake_config import MooncakeConfig

    settings = TorchSpecSettings(
        captured(2, 4, 5), "sgl", 1, gpus_per_engine=4, max_tokens=100, protocol="rdma", device="mlx5_0"
    )
    arguments = settings.arguments()
    assert arguments.aux_hidden_states_layers == [1, 3, 4]
    assert (arguments.inference_num_gpus, arguments.inference_num_gpus_per_engine) == (4, 4)
    arguments.mooncake_master_server_address = "host:1"
    store = MooncakeConfig.from_flat_args(arguments)
    assert (store.protocol, store.device_name, store.hidden_dim) == ("rdma", "mlx5_0", SIZE)
    assert (store.master_server_address, store.global_segment_size) == ("host:1", 0)


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
            transport.announce(request.key, request.key)
            taken = transport.take(request, 20.0)
        store.close()
    assert taken is not None
    assert taken.aux_hidden_states.equal(aux)
    assert taken.final_hidden_states.equal(final)
