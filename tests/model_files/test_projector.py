"""Projectors beside models, by the names that hubs give them."""

import json
from pathlib import Path

import pytest

from localchat.errors import ModelInvalid
from localchat.model_files.open_gguf import read_header
from localchat.model_files.projector import (
    find_projector,
    projector_files,
    projector_names,
    read_projector,
)
from tests.support.tiny_media import write_media_model


@pytest.mark.parametrize(
    ("model", "others", "expected"),
    [
        ("gemma-3-4b-it-Q4_K_M.gguf", ["mmproj-BF16.gguf", "mmproj-F16.gguf"], ["F16", "BF16"]),
        ("gemma-3-4b-it-Q4_K_M.gguf", ["gemma-3-4b-it-Q8_0.gguf", "mmproj-F16.gguf"], ["F16"]),
        ("SmolVLM-500M-Instruct-Q8_0.gguf", ["mmproj-SmolVLM-500M-Instruct-Q8_0.gguf"], ["Q8_0"]),
        ("moondream2-text-model-f16.gguf", ["moondream2-mmproj-f16.gguf"], ["f16"]),
        ("llava-v1.5-7b-Q4_K.gguf", ["llava-v1.5-7b-mmproj-model-f16.gguf"], ["f16"]),
        ("a-00001-of-00002.gguf", ["a-00002-of-00002.gguf", "mmproj.gguf"], [""]),
        ("a-Q4_0.gguf", ["b-Q4_0.gguf", "mmproj-F16.gguf"], []),
        ("a-Q4_0.gguf", ["b-Q4_0.gguf", "mmproj-b-F16.gguf"], []),
        ("a-Q4_0.gguf", ["imatrix.gguf", "mtp-a-Q4_0.gguf", "mmproj-F16.gguf"], ["F16"]),
        ("a-Q4_0.gguf", [], []),
        ("mmproj-a-F16.gguf", ["a-Q4_0.gguf"], []),
    ],
)
def test_projector_is_found_by_its_name(model: str, others: list[str], expected: list[str]) -> None:
    names = projector_names(model, sorted([model, *others]))
    assert [name.removesuffix(".gguf").rpartition("-")[2] for name in names] == [
        end or "mmproj" for end in expected
    ]


def test_projector_above_the_folder_of_a_quantization_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "Q4_K_M"
    folder.mkdir()
    (tmp_path / "mmproj-F16.gguf").touch()
    assert projector_files(folder / "big-00001-of-00002.gguf") == [tmp_path / "mmproj-F16.gguf"]
    other = tmp_path / "other"
    other.mkdir()
    assert projector_files(other / "big.gguf") == []


def test_projector_of_an_ollama_model_is_the_blob_of_its_manifest(tmp_path: Path) -> None:
    tiny = write_media_model(tmp_path / "made", "smolvlm")
    blobs = tmp_path / "blobs"
    manifest = tmp_path / "manifests/registry.ollama.ai/library/tiny/latest"
    blobs.mkdir()
    manifest.parent.mkdir(parents=True)
    model, projector = "a" * 64, "b" * 64
    tiny.model.rename(blobs / f"sha256-{model}")
    tiny.projector.rename(blobs / f"sha256-{projector}")
    kinds = {"model": model, "projector": projector}
    layers = [
        {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"}
        for kind, digest in kinds.items()
    ]
    (manifest.parent / "damaged").write_text("[1")
    manifest.write_text(json.dumps({"layers": layers}))
    found = find_projector(read_header(blobs / f"sha256-{model}"))
    assert found is not None
    assert found.path == blobs / f"sha256-{projector}"
    assert found.kinds == ("image",)


def test_projector_of_another_width_is_passed_over_or_refused(tmp_path: Path) -> None:
    tiny = write_media_model(tmp_path, "gemma3")
    header = read_header(tiny.model)
    found = find_projector(header)
    assert found is not None
    assert found.whole_tokens == 16
    assert found.embedding == 64
    data = tiny.projector.read_bytes().replace(
        b"clip.vision.projection_dim\x04\0\0\0\x40", b"clip.vision.projection_dim\x04\0\0\0\x80"
    )
    tiny.projector.write_bytes(data)
    assert find_projector(header) is None
    with pytest.raises(ModelInvalid, match="belongs to another model"):
        find_projector(header, str(tiny.projector))
    assert find_projector(header, "none") is None


def test_the_largest_picture_counts_where_pictures_differ(tmp_path: Path) -> None:
    patches = {}
    for family in ("smolvlm", "qwen2vl"):
        tiny = write_media_model(tmp_path / family, family)
        patches[family] = read_projector(tiny.projector).max_patches
    assert patches == {"smolvlm": 64, "qwen2vl": 16_384}
