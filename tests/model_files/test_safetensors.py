"""Headers of safetensors files."""

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localchat.errors import ModelInvalid, ModelMissing
from localchat.model_files.safetensors import Tensor, read_safetensors, read_safetensors_source
from tests.support.bytes_source import BytesSource


def encoded(header: object, data: int = 0) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(data)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = {
    "__metadata__": {"format": "pt"},
    "b": entry("F8_E4M3", [4], 24, 28),
    "a": entry("BF16", [3, 4], 0, 24),
    "empty": entry("I64", [0, 7], 28, 28),
}


def test_tensors_come_in_file_order(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(encoded(GOOD, 28))
    header = read_safetensors(path)
    start = header.file_bytes - 28
    assert header.tensors[:2] == (
        Tensor("a", (3, 4), "BF16", start, 24),
        Tensor("b", (4,), "F8_E4M3", start + 24, 4),
    )
    assert header.weights_bytes == 28
    assert header.metadata == {"format": "pt"}


def test_the_real_library_writes_what_is_read(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    import numpy as np

    path = tmp_path / "m.safetensors"
    numpy.save_file({"x": np.ones((2, 3), np.float16), "y": np.ones(5, np.int8)}, path)
    found = {tensor.name: (tensor.shape, tensor.dtype) for tensor in read_safetensors(path).tensors}
    assert found == {"x": ((2, 3), "F16"), "y": ((5,), "I8")}


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "claims 0 bytes"),
        (struct.pack("<Q", 1 << 62) + b"{}" + bytes(50), "claims"),
        (encoded(b"{" * 40), "not valid JSON"),
        (encoded(b"[" * 100_000), "not valid JSON"),
        (encoded([1, 2, 3, 4]), "not a table of tensors"),
        (encoded({"__metadata__": {"a": 1}}), "metadata"),
        (encoded({"a": 1, "b": 2, "c": 3}), "type, shape and place"),
        (encoded({"a": entry("F16", [-1], 0, 2)}, 2), "type, shape and place"),
        (encoded({"a": entry("F16", [2], 0, 5)}, 5), "takes 5 bytes"),
        (encoded({"a": entry("F16", [1 << 40, 1 << 40], 0, 2)}, 2), "takes 2 bytes"),
        (encoded({"a": entry("odd", [2], 0, 4)}, 4), "unknown type 'odd'"),
        (encoded({"a": entry("F" + "9" * 5000, [2], 0, 4)}, 4), "unknown type"),
        (encoded({"a": entry("F16\x1b]0;x\x07", [2], 0, 4)}, 4), r"unknown type 'F16\\x1b"),
        (encoded({"a": entry("F\u0661\u0666", [2], 0, 4)}, 4), "unknown type"),
        (encoded({"a": entry("F16", [10**4000] * 16, 0, 4)}, 4), "type, shape and place"),
        (encoded({"a\x1b[2J": entry("F16", [2], 0, 4)}, 4), r"the name 'a\\x1b"),
        (encoded({"a" * 5000: entry("F16", [2], 0, 4)}, 4), "the name 'a+'"),
        (encoded(b'{"\\ud800":{"dtype":"F16","shape":[2],"data_offsets":[0,4]}}', 4), "the name"),
        (encoded(b'{"a":{"dtype":"F16","dtype":"BF16"}}'), "a name occurs twice"),
        (encoded(b'{"a":1,"a":2}'), "a name occurs twice"),
        (encoded(json.dumps({}).encode("utf-16")), "not valid JSON"),
        (encoded({"a": entry("F16", [2], 2, 6)}, 6), "instead of"),
        (encoded({"a": entry("F16", [2], 0, 4), "b": entry("F16", [2], 2, 6)}, 6), "instead of"),
        (encoded({"a": entry("F16", [2], 0, 4)}, 3), "end at byte"),
    ],
)
def test_what_does_not_hold_together_is_refused(raw: bytes, says: str) -> None:
    with pytest.raises(ModelInvalid, match=says):
        read_safetensors_source(BytesSource(raw))


def test_a_missing_file_and_a_folder_are_told(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing):
        read_safetensors(tmp_path / "nothing.safetensors")
    with pytest.raises(ModelInvalid, match="cannot be read"):
        read_safetensors(tmp_path)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 250), st.binary(min_size=1, max_size=6))
def test_garbage_gives_our_errors_alone(at: int, junk: bytes) -> None:
    raw = bytearray(encoded(GOOD, 28))
    raw[at : at + len(junk)] = junk
    try:
        header = read_safetensors_source(BytesSource(bytes(raw)))
    except ModelInvalid:
        return
    assert header.file_bytes == len(raw)


def test_the_reason_for_a_refusal_is_short() -> None:
    names = {"a" * 100_000: entry("F16", [2], 0, 4)}
    shapes = {"a": entry("F16", [9**1000] * 16, 0, 4)}
    for header in (names, shapes, {"a": entry("x" * 100_000, [2], 0, 4)}):
        with pytest.raises(ModelInvalid) as refusal:
            read_safetensors_source(BytesSource(encoded(header, 4)))
        assert len(str(refusal.value)) < 300
