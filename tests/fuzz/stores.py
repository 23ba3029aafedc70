"""Readers of hidden states: stores, the codecs alone, and what transports carry."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from data.samples import CapturedSample
from data.store import HiddenStateStore
from data.store.codec import Encoding, check_encoded, decode, encode
from data.store.shards import open_shard, read_sidecar, refuse, refused
from data.transport.mooncake import MooncakeSettings, MooncakeTransport
from data.transport.protocol import StateRequest
from data.transport.spool import Spool
from eagle31.tensor_files import load_tensors
from tests.data.store.samples import make_sample, write_store
from tests.fuzz.reader import Reader, readers_of

FP8 = Encoding("fp8", "supervised")
SAMPLE = make_sample(3)
REQUEST = StateRequest("key", SAMPLE.input_ids, SAMPLE.loss_mask)


def store_readers(directory: Path) -> dict[str, Reader]:
    """Return the readers of a store's files."""
    write_store(directory)
    refuse(directory, "a", 3, "too long")
    return readers_of(
        directory,
        {
            "shard": (
                "shard-a-00000.safetensors",
                lambda d: open_shard(d / "shard-a-00000.safetensors").checksums(),
            ),
            "sidecar": ("shard-a-00000.json", lambda d: read_sidecar(d / "shard-a-00000.json")),
            "store_manifest": ("manifest.json", _store),
            "store_index": ("index.safetensors", _store),
            "store_shard": ("shard-b-00000.safetensors", _store),
            "refusals": ("refused/3.json", refused),
        },
    )


def _store(directory: Path) -> object:
    store = HiddenStateStore(directory)
    store.verify()
    return [store[index] for index in range(len(store))]


def transport_readers(directory: Path) -> dict[str, Reader]:
    """Return the readers of single samples: encoded ones, a spool's file and the values of Mooncake."""
    for name, encoding in (("bf16", Encoding("bf16", "all")), ("fp8", FP8)):
        save_file(encode(SAMPLE, encoding), directory / f"{name}.safetensors")
    spool = _spool(directory)
    spool.directory.mkdir()
    spool.put(REQUEST, SAMPLE.aux_hidden_states, SAMPLE.final_hidden_states)
    aux, final = SAMPLE.aux_hidden_states.flatten(1), SAMPLE.final_hidden_states
    values = [tensor.flatten().view(torch.uint8) for tensor in (aux, SAMPLE.input_ids, final)]
    (directory / "mooncake").write_bytes(torch.cat(values).numpy().tobytes())
    return readers_of(
        directory,
        {
            "codec_bf16": ("bf16.safetensors", lambda d: _decoded(d / "bf16.safetensors")),
            "codec_fp8": ("fp8.safetensors", lambda d: _decoded(d / "fp8.safetensors")),
            "spool": ("spool/key.safetensors", lambda d: _spool(d).take(REQUEST, 0.0)),
            "spool_in_memory": ("spool/key.safetensors", _from_memory),
            "mooncake": ("mooncake", _mooncake),
        },
    )


def _decoded(path: Path) -> CapturedSample:
    tensors = load_tensors(path)
    try:
        check_encoded(tensors)
    except ValueError as error:
        raise OSError from error
    return decode(tensors)


def _spool(directory: Path) -> Spool:
    return Spool(directory / "spool", FP8)


def _from_memory(directory: Path) -> CapturedSample | None:
    spool = _spool(directory)
    spool._checked = False  # as in /dev/shm
    return spool.take(REQUEST, 0.0)


def _mooncake(directory: Path) -> CapturedSample:
    """Read values as a transport does that has them in its buffer; their sizes are those of the request."""
    transport = MooncakeTransport.__new__(MooncakeTransport)
    transport.settings, transport.dtype = MooncakeSettings(), torch.bfloat16
    _, transport.num_aux_layers, transport.hidden_size = SAMPLE.aux_hidden_states.shape
    sizes = transport._sizes(len(REQUEST.input_ids))
    content = (directory / "mooncake").read_bytes()[: sum(sizes)].ljust(sum(sizes), b"\0")
    return transport._sample(REQUEST, *torch.frombuffer(bytearray(content), dtype=torch.uint8).split(sizes))
