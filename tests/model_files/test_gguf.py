"""GGUF headers: what is read, what is refused, and that nothing else ever comes out."""

import contextlib
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localchat.errors import ModelInvalid, ModelMissing
from localchat.model_files.adapter import read_adapter
from localchat.model_files.ggml_types import FILE_TYPES, NUMBER_FORMATS
from localchat.model_files.gguf import Array, read_gguf
from localchat.model_files.open_gguf import check_model, read_header, read_source
from localchat.model_files.projector import read_projector
from localchat.model_files.safetensors import read_safetensors
from tests.support.bytes_source import BytesSource
from tests.support.gguf_files import (
    ARCHITECTURES,
    CHATML,
    Gguf,
    Size,
    Tensor,
    Typed,
    Value,
    llama,
    write_model,
    write_split,
)

TINY = Size(layers=1, width=32, heads=2, kv_heads=1, feed_forward=32)


def refused(
    metadata: Mapping[str, Value] | None = None,
    *,
    tensor_count: int | None = None,
    key_count: int | None = None,
) -> str:
    """The message for a llama whose header is changed so."""
    whole = llama(TINY)
    raw = replace(
        whole,
        metadata=dict(whole.metadata) | dict(metadata or {}),
        tensor_count=tensor_count,
        key_count=key_count,
    )
    with pytest.raises(ModelInvalid) as caught:
        check_model(read_source(BytesSource(raw.encode(), "x.gguf")))
    return str(caught.value)


def test_a_header_tells_metadata_tensors_and_sizes(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "llama")
    header = read_header(path)
    assert header.architecture == "llama"
    assert header.number("block_count") == 2
    assert header.metadata["tokenizer.chat_template"] == CHATML
    assert header.vocab_size == 320
    assert header.metadata["tokenizer.ggml.tokens"] == Array(320)
    assert header.quantization == "F16"
    assert header.parts == (path,)
    assert header.file_bytes == path.stat().st_size
    embedding = header.tensors[0]
    assert (embedding.name, embedding.shape, embedding.format.name) == (
        "token_embd.weight",
        (64, 320),
        "F16",
    )
    assert embedding.offset == header.data_offset
    assert embedding.size_bytes == 64 * 320 * 2
    assert header.weights_bytes <= header.file_bytes - header.data_offset


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_our_reader_and_the_gguf_package_agree(tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / "m.gguf", name)
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    found = [
        (t.name, tuple(int(n) for n in t.shape), t.data_offset, t.n_bytes) for t in theirs.tensors
    ]
    assert [(t.name, t.shape, t.offset, t.size_bytes) for t in ours.tensors] == found
    assert set(ours.metadata) == {key for key in theirs.fields if not key.startswith("GGUF.")}


def test_the_tables_of_formats_are_those_of_the_gguf_package() -> None:
    for code, form in NUMBER_FORMATS.items():
        if code in iter(gguf.GGMLQuantizationType):
            kind = gguf.GGMLQuantizationType(code)
            assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (
                form.name,
                (form.block, form.block_bytes),
            )
    for code, name in FILE_TYPES.items():
        assert gguf.LlamaFileType(code).name in (
            f"ALL_{name}",
            f"MOSTLY_{name}",
            f"MOSTLY_{name}_MOE",
        )


def test_strings_are_built_when_asked_for(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    tokens = read_header(path, strings={"tokenizer.ggml.tokens"}).metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, Array)
    assert tokens.values is not None
    assert tokens.values[-1] == "<|im_end|>"


def test_version_2_is_read_and_strings_may_cross_the_window() -> None:
    whole = llama(TINY)
    strings = ["a" * n for n in range(0, 3000, 7)]
    long: dict[str, Value] = {
        "x.long": strings,
        "x.text": "b" * 700_000,
        "x.end": 5,
    }
    raw = replace(whole, version=2, metadata=dict(whole.metadata) | long)
    header = read_gguf(BytesSource(raw.encode()), strings={"x.long"})
    assert header.metadata["x.long"] == Array(429, tuple(strings))
    assert read_gguf(BytesSource(raw.encode())).metadata["x.end"] == 5


def test_only_the_header_is_read_through_the_source() -> None:
    class Counting(BytesSource):
        furthest = 0

        def read(self, offset: int, count: int) -> bytes:
            self.furthest = max(self.furthest, offset + count)
            return super().read(offset, count)

    source = Counting(llama(Size(layers=8, width=512, vocab=2048, heads=8)).encode())
    read_gguf(source)
    assert source.furthest < source.size // 10


@pytest.mark.parametrize("read", [read_header, read_adapter, read_projector, read_safetensors])
def test_a_pipe_is_refused_and_not_waited_for(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelInvalid, match="is not a regular file"):
        read(tmp_path / "pipe")


def test_a_missing_file_names_a_near_one(tmp_path: Path) -> None:
    write_model(tmp_path / "qwen.gguf")
    with pytest.raises(ModelMissing, match=r"Did you mean .*qwen\.gguf"):
        read_header(tmp_path / "qwem.gguf")
    with pytest.raises(ModelMissing, match="localchat list"):
        read_header(tmp_path / "nowhere" / "x.gguf")


def test_a_folder_says_which_model_it_holds(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match=r"is a folder(.|\n)*no \.gguf"):
        read_header(tmp_path)
    write_split(tmp_path, "m", 2)
    with pytest.raises(ModelInvalid, match=r"one model: give .*m-00001-of-00002\.gguf"):
        read_header(tmp_path)
    write_model(tmp_path / "other.gguf")
    with pytest.raises(ModelInvalid, match="2 models"):
        read_header(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"hello, this is a note\n" * 50, "a text file"),
        ("grüße\n".encode() * 100, "a text file"),
        (b"<!DOCTYPE html><html>", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "Git LFS"),
        (struct.pack("<Q", 20) + b'{"a":{"dtype":"F16"}}', "safetensors"),
        (b"PK\x03\x04" + bytes(60), "zip archive"),
        (b"lmgg" + bytes(60), "before GGUF"),
        (b"FUGG" + bytes(60), "big-endian"),
        (b"\x00\x01\x02\xff" * 40, "does not begin with GGUF"),
        (b"GGUF", "ends after 4 bytes"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "big endian"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), "version is 1"),
        (b"GGUF" + struct.pack("<I", 77) + bytes(60), "version is 77"),
    ],
)
def test_what_is_no_gguf_gets_its_own_words(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelInvalid, match=says) as caught:
        read_header(path)
    assert caught.value.hint
    assert str(path) in caught.value.message


@pytest.mark.parametrize("huge", [1 << 20, 1 << 32, (1 << 63) - 1, (1 << 64) - 1])
def test_absurd_counts_are_refused_at_once(huge: int) -> None:
    assert "claims" in refused(tensor_count=huge)
    assert "claims" in refused(key_count=huge)
    for kind in (4, 8):
        assert "claims" in refused({"x.list": struct.pack("<IIQ", 9, kind, huge)})
    assert "ends" in refused({"x.list": struct.pack("<IIQQ", 9, 8, 1, huge)}) or huge < 1 << 30
    assert "claims" in refused({"x.text": struct.pack("<IQ", 8, huge)}) or huge < 1 << 30


def test_a_last_string_longer_than_the_file_is_refused() -> None:
    for length in (9, 1 << 40, (1 << 64) - 1):
        raw = Gguf({"x.list": struct.pack("<IIQQ", 9, 8, 1, length)}, alignment=1).encode()
        with pytest.raises(ModelInvalid, match="ends after"):
            read_gguf(BytesSource(raw))


def test_what_llama_cpp_would_die_of_is_refused() -> None:
    for layers in (0, 513, 10**9):
        assert "block_count" in refused({"llama.block_count": layers})
    for length in (0, (1 << 32) - 1):
        assert "context_length" in refused({"llama.context_length": length})
    assert "block_count" in refused({"llama.block_count": 1.0})
    assert "block_count" in refused({"llama.block_count": "many"})
    assert "experts" in refused({"llama.expert_used_count": 4})
    assert "head_count_kv has 2 values" in refused(
        {"llama.block_count": 3, "llama.attention.head_count_kv": [1, 1]}
    )
    assert "architecture" in refused({"general.architecture": ""})
    with pytest.raises(ModelInvalid, match="no weights"):
        check_model(read_gguf(BytesSource(replace(llama(TINY), tensors=[]).encode())))
    assert "vision projector" in refused({"general.type": "mmproj"})
    assert "models for images or speech" in refused({"general.architecture": "flux"})


def test_reasons_that_quote_the_file_are_short() -> None:
    long = "x" * 50_000
    for metadata in (
        {"general.architecture": long},
        {"general.type": "mmproj", "general.architecture": long},
        {long: struct.pack("<IIQ", 9, 9, 1) + bytes(40)},
        {"llama.block_count": long},
    ):
        assert len(refused(metadata)) < 500


def test_metadata_must_be_whole_and_plain() -> None:
    assert "array of arrays" in refused({"x.deep": struct.pack("<IIQ", 9, 9, 1) + bytes(40)})
    assert "unknown type 99" in refused({"x.odd": struct.pack("<I", 99)})
    assert "empty" in refused({"": 1})
    assert "alignment" in refused({"general.alignment": 33})
    assert "alignment" in refused({"general.alignment": "x"})
    twice = Gguf({"a": 1, "b": 2}).encode().replace(b"b", b"a")
    with pytest.raises(ModelInvalid, match="repeated"):
        read_gguf(BytesSource(twice))


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (Tensor("a", (32, 4), code=99), "number format 99"),
        (Tensor("a", (33,), code=8), "shape"),
        (Tensor("a", (0,)), "shape"),
        (Tensor("a", (1 << 40, 1 << 40)), "shape"),
        (Tensor("a", (1, 1, 1, 1, 1)), "dimensions"),
        (Tensor("a" * 64, (32,)), "name of tensor"),
        (Tensor("a", (1 << 30,)), "ends at byte"),
        (Tensor("a", (32,), offset=8), "instead of 0"),
        (Tensor("a", (32,), offset=1 << 60), "instead of 0"),
    ],
)
def test_tensors_must_have_a_shape_and_a_place(tensor: Tensor, says: str) -> None:
    whole = Gguf({"general.architecture": "llama"}, [tensor])
    with pytest.raises(ModelInvalid, match=says):
        read_gguf(BytesSource(whole.header() + bytes(1024)))


def test_overlapping_and_repeated_tensors_are_refused() -> None:
    for second, says in (
        (Tensor("b", (32,), offset=64), "instead of 128"),
        (Tensor("a", (32,)), "twice"),
    ):
        raw = Gguf({"general.architecture": "llama"}, [Tensor("a", (32,)), second])
        with pytest.raises(ModelInvalid, match=says):
            read_gguf(BytesSource(raw.encode()))


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 0.9999))
def test_a_file_cut_anywhere_is_refused(share: float) -> None:
    whole = llama(TINY).encode()
    with pytest.raises(ModelInvalid):
        read_source(BytesSource(whole[: int(share * len(whole))]))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=9)), min_size=1, max_size=3
    )
)
def test_garbage_in_a_header_gives_our_errors_alone(edits: list[tuple[int, bytes]]) -> None:
    raw = bytearray(llama(TINY).encode())
    for at, junk in edits:
        raw[at : at + len(junk)] = junk
    with contextlib.suppress(ModelInvalid):
        check_model(read_source(BytesSource(bytes(raw))))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_give_our_errors_alone(junk: bytes) -> None:
    for raw in (junk, b"GGUF" + junk, b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + junk):
        with pytest.raises(ModelInvalid):
            check_model(read_source(BytesSource(raw)))


# ---------------------------------------------------------------------------- split models


def test_any_part_of_a_split_model_gives_the_whole(tmp_path: Path) -> None:
    parts = write_split(tmp_path, "m", 3)
    headers = [read_header(part) for part in parts]
    assert headers[0] == headers[1] == headers[2]
    assert headers[0].parts == tuple(parts)
    assert headers[0].architecture == "llama"
    assert {tensor.part for tensor in headers[0].tensors} == {0, 1, 2}
    assert headers[0].file_bytes == sum(part.stat().st_size for part in parts)


def test_a_split_model_with_a_part_missing_names_it(tmp_path: Path) -> None:
    parts = write_split(tmp_path, "m", 3)
    parts[1].unlink()
    with pytest.raises(ModelMissing, match=r"m-00002-of-00003\.gguf") as caught:
        read_header(parts[2])
    assert str(tmp_path) in caught.value.hint


def test_parts_of_different_models_are_refused(tmp_path: Path) -> None:
    parts = write_split(tmp_path, "m", 2)
    parts[1].write_bytes(parts[0].read_bytes())
    with pytest.raises(ModelInvalid, match=r"split\.no 0"):
        read_header(parts[0])
    write_split(tmp_path, "m", 2)
    write_model(parts[1])
    with pytest.raises(ModelInvalid, match=r"split\.count None"):
        read_header(parts[0])


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    part = write_split(tmp_path, "m", 2)[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelInvalid, match="one part of a split model"):
        read_header(part)
    with pytest.raises(ModelInvalid, match="part 3 of 2"):
        read_header(part.rename(tmp_path / "m-00003-of-00002.gguf"))


def test_tensors_missing_from_all_parts_are_noticed(tmp_path: Path) -> None:
    whole = llama(TINY)
    split = {
        "split.no": Typed(2, 0),
        "split.count": Typed(2, 1),
        "split.tensors.count": Typed(5, 99),
    }
    path = tmp_path / "m-00001-of-00001.gguf"
    replace(whole, metadata=dict(whole.metadata) | split).write(path)
    with pytest.raises(ModelInvalid, match="99 are expected"):
        read_header(path)
