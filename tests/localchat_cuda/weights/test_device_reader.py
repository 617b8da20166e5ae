"""Reading parts of files: what comes back, and how often each byte is read."""

import random
from pathlib import Path

import pytest
import torch

from localchat_cuda.weights import device_reader
from localchat_cuda.weights.device_reader import DeviceReader, Extent

CPU = torch.device("cpu")


class BytesRead:
    """Counts the bytes that the threads read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        read = device_reader._read

        def counted(out: memoryview, path: Path, offset: int) -> int:
            self.count += len(out)
            return read(out, path, offset)

        monkeypatch.setattr(device_reader, "_read", counted)


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_reader, "_PIECE", 300)
    monkeypatch.setattr(device_reader, "_STAGE", 1000)
    monkeypatch.setattr(device_reader, "_HOLE", 8)


def written(folder: Path, size: int, name: str = "weights") -> tuple[Path, bytes]:
    data = random.Random(size).randbytes(size)
    path = folder / name
    path.write_bytes(data)
    return path, data


def extents_of(path: Path, size: int, *, hole: int = 0) -> list[Extent]:
    """Return neighbors of various sizes, from 1 byte to more than a buffer."""
    draw = random.Random(1)
    extents: list[Extent] = []
    offset = 0
    while True:
        length = draw.choice((1, 50, 120, 400, 999, 1000, 2300))
        if offset + length > size:
            return extents
        extents.append(Extent(path, offset, length))
        offset += length + hole


def read(reader: DeviceReader, extent: Extent) -> bytes:
    return reader.read(*extent).numpy().tobytes()


def wanted(data: bytes, extent: Extent) -> bytes:
    return data[extent.offset : extent.offset + extent.size]


def test_a_file_is_read_by_threads_in_pieces_as_it_is(tmp_path: Path) -> None:
    path, data = written(tmp_path, 12_345)
    reader = DeviceReader(CPU)
    for first, size in ((0, 12_345), (7, 1000), (11, 12_000), (12_345, 0), (5, 1)):
        assert reader.read(path, first, size).numpy().tobytes() == data[first : first + size]
    with pytest.raises(ValueError, match="too short"):
        reader.read(path, 12_000, 346)
    assert reader.read(path, 1, 2).numpy().tobytes() == data[1:3]


@pytest.mark.parametrize("hole", [0, 8, 9])
def test_tensors_are_equal_in_any_order(tmp_path: Path, hole: int) -> None:
    files = [written(tmp_path, size, str(size)) for size in (20_000, 5_001)]
    data = dict(files)
    extents = [e for path, content in files for e in extents_of(path, len(content), hole=hole)]
    for seed in range(20):
        order = random.Random(seed).sample(extents, len(extents))
        reader = DeviceReader(CPU, extents)
        for extent in [*order, order[0]]:
            assert read(reader, extent) == wanted(data[extent.path], extent)


def test_in_the_order_of_the_file_no_byte_is_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = written(tmp_path, 20_000)
    extents = extents_of(path, 20_000)
    read_bytes = BytesRead(monkeypatch)
    reader = DeviceReader(CPU, extents)
    for extent in extents:
        read(reader, extent)
    assert read_bytes.count == sum(extent.size for extent in extents)


def test_layers_that_are_read_backwards_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = written(tmp_path, 24_000)
    extents = [Extent(path, offset, 200) for offset in range(0, 24_000, 200)]
    read_bytes = BytesRead(monkeypatch)
    reader = DeviceReader(CPU, extents)
    for layer in range(0, 120, 12):
        for extent in reversed(extents[layer : layer + 12]):
            read(reader, extent)
    assert read_bytes.count == 24_000


def test_a_file_that_is_cut_off_fails_at_the_tensor_that_it_lacks(tmp_path: Path) -> None:
    path, data = written(tmp_path, 2_000)
    extents = [Extent(path, offset, 250) for offset in range(0, 2_250, 250)]
    reader = DeviceReader(CPU, extents)
    for extent in extents[:8]:
        assert read(reader, extent) == wanted(data, extent)
    with pytest.raises(ValueError, match="too short"):
        read(reader, extents[8])
    path.unlink()
    reader = DeviceReader(CPU, extents)
    for extent in extents:
        with pytest.raises(FileNotFoundError):
            read(reader, extent)


def test_a_tensor_keeps_no_neighbors_in_memory(tmp_path: Path) -> None:
    path, _ = written(tmp_path, 1_000)
    extents = [Extent(path, offset, 100) for offset in range(0, 1_000, 100)]
    reader = DeviceReader(CPU, extents)
    tensors = [reader.read(*extent) for extent in extents]
    assert {tensor.untyped_storage().nbytes() for tensor in tensors} == {100}
