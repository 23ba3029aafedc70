from pathlib import Path

from data.store.manage import damage
from tests.data.store.samples import flip_last_byte, write_store


def test_every_kind_of_damage_is_named(tmp_path: Path) -> None:
    write_store(tmp_path)
    assert not list(damage(tmp_path))
    first, second = "shard-a-00000", "shard-b-00000"
    with (tmp_path / f"{first}.safetensors").open("r+b") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))  # in its checksums, which come first
        file.write(b"\1")
    flip_last_byte(tmp_path / f"{second}.safetensors")
    flip_last_byte(tmp_path / "index.npy")
    found = list(damage(tmp_path))
    assert [Path(error.field).name for error in found] == [
        "index.npy",
        f"{first}.safetensors",
        f"{second}.safetensors",
    ]
    (tmp_path / f"{first}.safetensors").unlink()
    assert "gone" in list(damage(tmp_path))[1].remedy
    (tmp_path / "manifest.json").unlink()
    assert len(list(damage(tmp_path))) == 1  # unfinished: of the shards that are there
