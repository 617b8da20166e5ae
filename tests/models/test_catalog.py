"""The catalogue that ships: its form, and that it covers what people ask for."""

import tomllib
from collections import Counter
from pathlib import Path

import pytest

from localchat.atomic import write_text
from localchat.backend_api.interface import Backend
from localchat.errors import LocalchatError, UsageError
from localchat.models.catalog import CatalogEntry, read_models, shipped_file
from localchat.models.names import parse
from localchat.models.published_shapes import gguf_shape, read_published_shapes
from localchat.models.quantizations import is_quantization
from localchat_cuda.backend import CudaBackend
from localchat_llamacpp.backend import LlamaCppBackend
from localchat_llamacpp.build_advice import knows_architecture
from tests.support.published_checkpoints import published_checkpoint

CATALOGUE: dict[str, CatalogEntry] = read_models(shipped_file())
BODY = (
    'parameters = 1_000_000\ncontext_tokens = 512\nlicense = "MIT"\nabout = "x"\nuses = ["chat"]\n'
    'sources = [{ repository = "a/b", format = "gguf", quantizations = ["Q4_K_M"] }]\n'
)


def test_the_older_spelling_of_license_is_read(tmp_path: Path) -> None:
    shipped = shipped_file().read_text("utf-8")
    own = tmp_path / "models.toml"
    own.write_text(shipped.replace("license = ", "licence = "), "utf-8")
    assert read_models(own) == read_models(shipped_file())


def test_it_has_the_families_that_people_use() -> None:
    families = {entry.family for entry in CATALOGUE.values()}
    wanted = {"qwen2.5", "qwen3", "llama3.1", "llama3.2", "llama3.3", "mistral", "gemma3", "phi4"}
    assert wanted | {"deepseek-r1", "smollm2", "qwen2.5-coder", "nomic-embed-text"} <= families
    assert {
        "qwen3.5",
        "qwen3.6",
        "qwen3.8",
        "gemma4",
        "gpt-oss",
        "ministral3",
        "granite4",
    } <= families
    chatting = [entry for entry in CATALOGUE.values() if "chat" in entry.uses]
    assert len(chatting) >= 25
    sizes = sorted(entry.parameters for entry in chatting)
    assert sizes[0] < 3e8 and sizes[-1] > 7e10
    assert any("infill" in entry.uses for entry in CATALOGUE.values())


@pytest.mark.parametrize("name", CATALOGUE)
def test_entry_is_sound(name: str) -> None:
    entry = CATALOGUE[name]
    first = entry.sources[0]
    assert first.format == "gguf"
    assert all(is_quantization(each) for each in first.quantizations)
    assert len({source.repository for source in entry.sources}) == len(entry.sources)
    repeated = Counter(each.upper() for source in entry.sources for each in source.quantizations)
    assert max(repeated.values()) == 1
    assert entry.active_parameters is None or entry.active_parameters < entry.parameters
    for source in entry.sources:
        assert (source.format == "gguf") == source.repository.upper().endswith("GGUF")
        for each in source.quantizations:
            assert parse(f"{name}-{each.lower()}", CATALOGUE).repository == source.repository


WITHOUT_SHAPE = {
    "all-minilm:l6-v2": "bert",
    "bge-m3:567m": "bert",
    "bge-small-en:v1.5": "bert",
    "deepseek-v4-flash:284b-a13b": "deepseek4",
    "embeddinggemma:300m": "gemma-embedding",
    "granite4.1:3b": "granite",
    "granite4.1:8b": "granite",
    "jina-embeddings-v2:base-en": "jina-bert-v2",
    "laguna-xs2.1:33b-a3b": "laguna",
    "lfm2.5:1.2b": "lfm2",
    "lfm2.5:8b-a1b": "lfm2moe",
    "minimax-m2.5:229b-a10b": "minimax-m2",
    "mistral-small4:119b-a6b": "mistral4",
    "nemotron3-nano:30b-a3b": "nemotron_h_moe",
    "nemotron3-nano:4b": "nemotron_h",
    "nomic-embed-text:v1.5": "nomic-bert",
    "qwen3.5:122b-a10b": "qwen35moe",
}
"""Entries without a published shape, and their architecture."""


@pytest.mark.parametrize("name", CATALOGUE)
def test_everything_that_is_listed_has_a_backend_that_runs_it(name: str) -> None:
    backends: dict[str, Backend] = {"gguf": LlamaCppBackend(), "safetensors": CudaBackend()}
    if name in WITHOUT_SHAPE:
        assert knows_architecture(WITHOUT_SHAPE[name])
        assert {source.format for source in CATALOGUE[name].sources} == {"gguf"}
        return
    for source in CATALOGUE[name].sources:
        for quantization in source.quantizations:
            shape = read_published_shapes()[name]
            build = gguf_shape if source.format == "gguf" else published_checkpoint
            model = build(CATALOGUE[name], shape, quantization)
            assert model is not None, quantization
            assert backends[source.format].objection(model) == "", quantization
            # Vectors and scores are made by llama.cpp alone.
            assert "chat" in CATALOGUE[name].uses or source.format == "gguf"


def test_size_in_the_name_is_about_the_number_of_parameters() -> None:
    for name, entry in CATALOGUE.items():
        head = name.partition(":")[2].split("-")[0]
        if head[-1] in "bm" and head[:-1].replace(".", "").isdigit():
            told = float(head[:-1]) * (1e9 if head[-1] == "b" else 1e6)
            assert 0.8 < entry.parameters / told < 1.25, name


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[models", "not TOML"),
        ("[other]\nx = 1", "other"),
        (f'[models."NoColon"]\n{BODY}', "NoColon"),
        (f'[models."a:b"]\n{BODY}colour = 1', "colour"),
        (f'[models."a:b"]\n{BODY}'.replace("512", "-1"), "context_tokens"),
        (f'[models."a:b"]\n{BODY}'.replace("a/b", "../b"), "repository"),
        (f'[models."a:b"]\n{BODY}'.replace('"chat"', '"magic"'), "uses"),
        ('[models."a:b"]\nparameters = 5', "models.toml"),
    ],
)
def test_file_that_is_not_right_is_refused_with_its_place(
    tmp_path: Path, text: str, told: str
) -> None:
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=told) as caught:
        read_models(path)
    assert str(path) in caught.value.message


def test_file_is_parsed_again_after_a_change_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "models.toml"
    path.write_text(f'[models."a:b"]\n{BODY}')
    assert [*read_models(path)] == ["a:b"]
    parsed: list[str] = []
    loads = tomllib.loads

    def loading(text: str) -> dict[str, object]:
        parsed.append(text)
        return loads(text)

    monkeypatch.setattr(tomllib, "loads", loading)
    read_models(path).clear()  # what a reader does with its entries is its own affair
    assert [*read_models(path)] == ["a:b"]
    assert parsed == []
    write_text(path, f'[models."c:d"]\n{BODY}')
    assert [*read_models(path)] == ["c:d"]
    assert len(parsed) == 1
    path.unlink()
    with pytest.raises(LocalchatError, match="cannot be read"):
        read_models(path)
