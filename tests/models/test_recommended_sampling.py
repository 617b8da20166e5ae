"""The catalogue's sampling, found under every name that a model goes by, and its place among the layers."""

from pathlib import Path

import pytest

from localchat.config.paths import Paths, find_paths
from localchat.models.hub.manifest import Manifest, PulledFile, record
from localchat.models.recommended_sampling import NO_RECOMMENDATION, recommended_sampling
from localchat.models.resolve import ResolvedModel
from tests.support.catalog_samples import SEVEN_B


@pytest.fixture
def paths() -> Paths:
    import os

    return find_paths(os.environ)


@pytest.mark.parametrize(
    ("word", "path"),
    [
        ("qwen2.5:7b", "a.gguf"),
        ("qwen2.5:7b-q8_0", "a.gguf"),
        ("ollama/qwen2.5:7b", "sha256-00"),
        ("hf.co/Qwen/Qwen2.5-7B-Instruct-GGUF:Q8_0", "a.gguf"),
        ("hf/Qwen/Qwen2.5-7B-Instruct-GGUF:Q8_0", "a.gguf"),
        ("hf.co/somebody/Qwen2.5-7B-Instruct-GGUF:Q8_0", "a.gguf"),
        ("/models/Qwen2.5-7B-Instruct-Q4_K_M.gguf", "/models/Qwen2.5-7B-Instruct-Q4_K_M.gguf"),
        ("llamacpp/x", "/cache/qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf"),
        ("/models/Qwen2.5-7B-Instruct-AWQ", "/models/Qwen2.5-7B-Instruct-AWQ"),
    ],
)
def test_every_name_of_a_model_finds_its_advice(word: str, path: str, paths: Paths) -> None:
    found = recommended_sampling(ResolvedModel(word, word, Path(path), ""), paths)
    assert found.sampling == SEVEN_B
    assert found.entry == "qwen2.5:7b"


@pytest.mark.parametrize(
    ("word", "path"),
    [
        ("guide", "guide.gguf"),
        ("/models/mine.gguf", "/models/mine.gguf"),
        ("ollama/somebody/qwen2.5:7b", "sha256-00"),
        ("qwen2.5", "qwen2.5.gguf"),
        (
            "/m/Qwen2.5-7B-Instruct-Uncensored-Q4_K_M.gguf",
            "/m/Qwen2.5-7B-Instruct-Uncensored-Q4_K_M.gguf",
        ),
    ],
)
def test_what_the_catalogue_does_not_know_gets_none(word: str, path: str, paths: Paths) -> None:
    assert (
        recommended_sampling(ResolvedModel(word, word, Path(path), ""), paths) == NO_RECOMMENDATION
    )


def test_a_repository_that_was_pulled_is_found_behind_any_name(paths: Paths) -> None:
    folder = paths.models_dir / "Qwen" / "Qwen2.5-7B-Instruct-GGUF"
    folder.mkdir(parents=True)
    (folder / "odd.gguf").write_bytes(b"GGUF")
    record(
        folder,
        Manifest(
            name="hf.co/Qwen/Qwen2.5-7B-Instruct-GGUF:odd",
            repository="Qwen/Qwen2.5-7B-Instruct-GGUF",
            revision="r",
            quantization="Q4_K_M",
            format="gguf",
            files=(PulledFile(path="odd.gguf", size=4, sha256="0" * 64),),
            pulled_at="now",
        ),
    )
    found = recommended_sampling(ResolvedModel("fast", "fast", folder / "odd.gguf", ""), paths)
    assert found.sampling == SEVEN_B
