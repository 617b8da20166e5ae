"""Models of other programs: found where they lie, named, and never touched."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from localchat.config.paths import find_paths
from localchat.errors import ModelInvalid, ModelMissing, UsageError
from localchat.models.aliases import add_folder
from localchat.models.external.discovery import (
    find_external_file,
    find_external_models,
)
from localchat.models.external.stores import ExternalModel
from localchat.models.quantizations import quantization_of
from localchat.models.resolve import locate
from tests.support.external_stores import ADAPTER, MODEL, TENSOR, Hub, Ollama, gguf
from tests.support.gguf_files import write_split

LIBRARY = "registry.ollama.ai/library"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "person"
    folder.mkdir()
    return folder


@pytest.fixture
def environ(home: Path) -> dict[str, str]:
    return {"HOME": str(home), "LOCALCHAT_DATA_DIR": str(home / "ours")}


def names(environ: Mapping[str, str], root: Path) -> dict[str, ExternalModel]:
    return {model.name: model for model in find_external_models(environ, root=root).models}


def test_nothing_is_found_where_nobody_keeps_models(
    environ: dict[str, str], tmp_path: Path
) -> None:
    assert find_external_models(environ, root=tmp_path) == ((), ())


# ---------------------------------------------------------------------------- Ollama


def test_ollama_models_are_their_blobs(environ: dict[str, str], home: Path, tmp_path: Path) -> None:
    cabinet = Ollama(home / ".ollama/models")
    blob = cabinet.model(f"{LIBRARY}/qwen2.5/7b", gguf(tmp_path / "a.gguf"))
    other = cabinet.model("registry.ollama.ai/ann/story/latest", gguf(tmp_path / "b.gguf", 2))
    third = cabinet.model("hf.co/org/repo-GGUF/Q4_K_M", gguf(tmp_path / "c.gguf", 3))
    found = names(environ, tmp_path)
    assert {name: model.path for name, model in found.items()} == {
        "ollama/qwen2.5:7b": blob,
        "ollama/ann/story:latest": other,
        "ollama/hf.co/org/repo-GGUF:Q4_K_M": third,
    }
    assert any("template is not used" in note for note in found["ollama/qwen2.5:7b"].notes)
    assert find_external_file("ollama/qwen2.5:7b", environ, root=tmp_path) == blob
    assert find_external_file("Ollama/ann/story", environ, root=tmp_path) == other
    assert find_external_file("ollama/nothing", environ, root=tmp_path) is None


def test_ollama_of_the_variable_and_of_the_service(
    environ: dict[str, str], home: Path, tmp_path: Path
) -> None:
    source = gguf(tmp_path / "a.gguf")
    own = Ollama(tmp_path / "elsewhere").model(f"{LIBRARY}/own/1b", source)
    service = tmp_path / "usr/share/ollama/.ollama/models"
    shared = Ollama(service).model(f"{LIBRARY}/shared/1b", gguf(tmp_path / "b.gguf", 2))
    Ollama(home / ".ollama/models").model(f"{LIBRARY}/unseen/1b", source)
    found = names({**environ, "OLLAMA_MODELS": str(tmp_path / "elsewhere")}, tmp_path)
    assert {name: model.path for name, model in found.items()} == {
        "ollama/own:1b": own,
        "ollama/shared:1b": shared,
    }


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        ([(TENSOR, "1" * 64)], "single tensors"),
        ([], "not on this machine"),
        ([(MODEL, "1" * 64)], "missing"),
        ([(MODEL, "1" * 64), (MODEL, "2" * 64)], "several files"),
        ([(MODEL, "../../../../etc/passwd")], "is damaged"),
    ],
)
def test_an_ollama_model_without_a_usable_file_says_why(
    layers: list[tuple[str, str]], told: str, environ: dict[str, str], home: Path, tmp_path: Path
) -> None:
    Ollama(home / ".ollama/models").manifest(f"{LIBRARY}/odd/1b", *layers)
    model = names(environ, tmp_path)["ollama/odd:1b"]
    assert model.path is None
    assert told in model.trouble
    with pytest.raises(ModelInvalid, match=told):
        find_external_file("ollama/odd:1b", environ, root=tmp_path)


def test_an_adapter_of_ollama_is_said_to_be_unused(
    environ: dict[str, str], home: Path, tmp_path: Path
) -> None:
    cabinet = Ollama(home / ".ollama/models")
    digest, _ = cabinet.blob(gguf(tmp_path / "a.gguf").read_bytes())
    cabinet.manifest(f"{LIBRARY}/tuned/1b", (MODEL, digest), (ADAPTER, digest))
    assert any("adapter" in note for note in names(environ, tmp_path)["ollama/tuned:1b"].notes)


def test_a_broken_manifest_is_a_finding_and_hides_no_other(
    environ: dict[str, str], home: Path, tmp_path: Path
) -> None:
    cabinet = Ollama(home / ".ollama/models")
    cabinet.manifest(f"{LIBRARY}/broken/1b").write_text('{"layers": [')
    (cabinet.folder / "manifests" / LIBRARY / "broken/.DS_Store").write_bytes(b"\0")
    cabinet.model(f"{LIBRARY}/whole/1b", gguf(tmp_path / "a.gguf"))
    found = names(environ, tmp_path)
    assert set(found) == {"ollama/broken:1b", "ollama/whole:1b"}
    assert found["ollama/broken:1b"].trouble == "Ollama's manifest is damaged"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_place_that_may_not_be_read_is_told(
    environ: dict[str, str], home: Path, tmp_path: Path
) -> None:
    cabinet = Ollama(home / ".ollama/models")
    cabinet.folder.chmod(0)
    try:
        assert "group ollama" in " ".join(find_external_models(environ, root=tmp_path).notices)
    finally:
        cabinet.folder.chmod(0o700)


# ---------------------------------------------------------------------------- LM Studio


@pytest.mark.parametrize("place", [".lmstudio/models", ".cache/lm-studio/models"])
def test_lm_studio_models(place: str, environ: dict[str, str], home: Path, tmp_path: Path) -> None:
    path = gguf(home / place / "lmstudio-community/Qwen-GGUF/Qwen-Q4_K_M.gguf")
    gguf(path.with_name("mmproj-Qwen-f16.gguf"))
    assert {name: model.path for name, model in names(environ, tmp_path).items()} == {
        "lmstudio/Qwen-GGUF/Qwen-Q4_K_M": path
    }
    assert find_external_file("lmstudio/qwen-gguf/qwen-q4_k_m", environ, root=tmp_path) == path
    assert find_external_file("lmstudio/Qwen-GGUF", environ, root=tmp_path) == path


def test_lm_studio_of_its_settings_and_pointer(
    environ: dict[str, str], home: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    (home / ".lmstudio-home-pointer").write_text(f"{moved}\n")
    (moved / "settings.json").write_text(json.dumps({"downloadsFolder": str(tmp_path / "disk")}))
    gguf(tmp_path / "disk/org/repo/one.gguf")
    gguf(moved / "models/org/repo/two.gguf", 2)
    assert set(names(environ, tmp_path)) == {"lmstudio/repo/one", "lmstudio/repo/two"}


def test_equal_names_of_two_publishers_are_told_apart(
    environ: dict[str, str], home: Path, tmp_path: Path
) -> None:
    one = gguf(home / ".lmstudio/models/ann/repo/m.gguf")
    gguf(home / ".lmstudio/models/bob/repo/m.gguf", 2)
    assert set(names(environ, tmp_path)) == {"lmstudio/ann/repo/m", "lmstudio/bob/repo/m"}
    assert find_external_file("lmstudio/ann/repo/m", environ, root=tmp_path) == one


# ---------------------------------------------------------------------------- Hugging Face


def test_hub_cache_models_are_the_links_of_the_newest_revision(
    environ: dict[str, str], home: Path, tmp_path: Path
) -> None:
    hub = Hub(home / ".cache/huggingface/hub")
    source = gguf(tmp_path / "a.gguf")
    old = hub.file("org/Qwen-GGUF", "aaa", "qwen-q8_0.gguf", source)
    hub.file("org/Qwen-GGUF", "aaa", "qwen-q4_k_m.gguf", gguf(tmp_path / "b.gguf", 2))
    new = hub.file("org/Qwen-GGUF", "bbb", "qwen-q4_k_m.gguf", gguf(tmp_path / "c.gguf", 3))
    hub.main("org/Qwen-GGUF", "bbb")
    gone = hub.file("org/Gone-GGUF", "aaa", "gone.gguf", gguf(tmp_path / "d.gguf", 4))
    gone.resolve().unlink()
    assert {name: model.path for name, model in names(environ, tmp_path).items()} == {
        "hf/org/Qwen-GGUF:Q4_K_M": new,
        "hf/org/Qwen-GGUF:Q8_0": old,
    }
    for word in (
        "hf/org/Qwen-GGUF:q4_k_m",
        "hf.co/org/qwen-gguf:Q4_K_M",
        "hf/org/Qwen-GGUF/qwen-q4_k_m",
    ):
        assert find_external_file(word, environ, root=tmp_path) == new
    with pytest.raises(UsageError, match="2 models"):
        find_external_file("hf/org/Qwen-GGUF", environ, root=tmp_path)


@pytest.mark.parametrize(
    ("variable", "inner"),
    [("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")],
)
def test_hub_cache_is_where_the_variables_say(
    variable: str, inner: str, environ: dict[str, str], tmp_path: Path
) -> None:
    Hub(tmp_path / "there" / inner).file("org/repo", "aaa", "m.gguf", gguf(tmp_path / "a.gguf"))
    found = names({**environ, variable: str(tmp_path / "there")}, tmp_path)
    assert set(found) == {"hf/org/repo/m"}


def test_two_files_of_one_quantization_go_by_their_names(
    environ: dict[str, str], home: Path, tmp_path: Path
) -> None:
    hub = Hub(home / ".cache/huggingface/hub")
    hub.file("org/repo", "aaa", "small-Q4_0.gguf", gguf(tmp_path / "a.gguf"))
    hub.file("org/repo", "aaa", "large/large-Q4_0.gguf", gguf(tmp_path / "b.gguf", 2))
    assert set(names(environ, tmp_path)) == {
        "hf/org/repo/small-Q4_0",
        "hf/org/repo/large/large-Q4_0",
    }


# ---------------------------------------------------------------------------- llama.cpp, folders


def test_llama_cpp_cache_and_its_variable(
    environ: dict[str, str], home: Path, tmp_path: Path
) -> None:
    path = gguf(home / ".cache/llama.cpp/org_repo_m-Q4_0.gguf")
    path.with_suffix(".gguf.json").write_text("{}")
    path.with_suffix(".gguf.downloadInProgress").write_bytes(b"GGUF")
    assert set(names(environ, tmp_path)) == {"llamacpp/org_repo_m-Q4_0"}
    moved = {**environ, "LLAMA_CACHE": str(tmp_path / "there")}
    gguf(tmp_path / "there/other.gguf")
    assert set(names(moved, tmp_path)) == {"llamacpp/other"}


def test_folders_of_the_user_with_split_models_and_without_doubles(
    environ: dict[str, str], home: Path, tmp_path: Path
) -> None:
    studio = gguf(home / ".lmstudio/models/ann/repo/m.gguf")
    folder = home / "disk"
    (folder / "deep").mkdir(parents=True)
    (folder / "m-link.gguf").symlink_to(studio)
    split = write_split(folder / "deep", "big", 2)
    (folder / ".hidden").mkdir()
    gguf(folder / ".hidden/x.gguf")
    (folder / "round").symlink_to(folder)
    add_folder(find_paths(environ), folder)
    assert {name: model.path for name, model in names(environ, tmp_path).items()} == {
        "lmstudio/repo/m": studio,
        "folder/big": split[0],
    }


# ---------------------------------------------------------------------------- locate


def test_an_adopted_name_locates_its_file(
    environ: dict[str, str], home: Path, tmp_path: Path
) -> None:
    blob = Ollama(home / ".ollama/models").model(f"{LIBRARY}/qwen2.5/7b", gguf(tmp_path / "a.gguf"))
    found = locate("ollama/qwen2.5:7b", find_paths(environ), "here", environ)
    assert (found.path, found.name, found.word) == (blob, "ollama/qwen2.5:7b", "ollama/qwen2.5:7b")


@pytest.mark.parametrize("word", ["qwen2.5:7b", "QWEN2.5", "org/repo", "repo"])
def test_the_only_model_whose_name_ends_with_a_word_is_used(
    environ: dict[str, str], home: Path, tmp_path: Path, word: str
) -> None:
    path = gguf(home / "blob.gguf")
    Ollama(home / ".ollama/models").model(f"{LIBRARY}/qwen2.5/7b", path)
    gguf(home / ".lmstudio/models/org/repo/m.gguf")
    found = locate(word, find_paths(environ), "here", environ)
    assert found.name == ("lmstudio/repo/m" if "repo" in word else "ollama/qwen2.5:7b")
    assert found.notice == f"using {found.name} for {word}"


def test_a_misspelled_word_is_told_the_names_of_other_programs(
    environ: dict[str, str], home: Path
) -> None:
    Ollama(home / ".ollama/models").model(f"{LIBRARY}/zephyr/7b", gguf(home / "a.gguf"))
    with pytest.raises(ModelMissing) as told:
        locate("zephir:7b", find_paths(environ), "here", environ)
    assert told.value.hint.count("ollama/zephyr:7b") == 2


def test_a_word_that_ends_several_names_lists_them(environ: dict[str, str], home: Path) -> None:
    store = Ollama(home / ".ollama/models")
    store.model(f"{LIBRARY}/tiny/1b", gguf(home / "a.gguf"))
    store.model(f"{LIBRARY}/tiny/2b", gguf(home / "b.gguf", 2))
    with pytest.raises(UsageError, match="tiny matches 2 models") as told:
        locate("tiny", find_paths(environ), "here", environ)
    assert "ollama/tiny:1b, ollama/tiny:2b" in told.value.hint


@pytest.mark.parametrize(
    ("word", "place", "hint"),
    [
        ("ollama/llama3", "models of Ollama", "ollama pull llama3 fetches it there"),
        ("LMStudio/repo/m", "models of LM Studio", "localchat list shows what is here"),
        (
            "hf/org/repo:Q8_0",
            "models of the Hugging Face cache",
            "localchat pull hf.co/org/repo:Q8_0",
        ),
        ("folder/m", "imported folders", "localchat list shows what is here"),
    ],
)
def test_an_adopted_name_that_means_nothing_is_looked_for_where_it_says(
    word: str, place: str, hint: str, environ: dict[str, str], home: Path
) -> None:
    with pytest.raises(ModelMissing, match=f"{word} is not among the {place}") as told:
        locate(word, find_paths(environ), "here", environ)
    assert hint in told.value.hint
    assert f"hf.co/{word.partition('/')[0]}" not in told.value.hint


@pytest.mark.parametrize(
    ("stem", "found"),
    [
        *(("qwen2.5-7b-instruct-q4_k_m", "Q4_K_M"), ("Phi-4-UD-Q4_K_XL", "UD-Q4_K_XL")),
        *(
            ("m.IQ2_XXS", "IQ2_XXS"),
            ("m-fp16", "FP16"),
            ("m-f16", "F16"),
            ("gpt-oss-20b-mxfp4", "MXFP4"),
        ),
        *(("m-Q8_0-00001-of-00002", "Q8_0"), ("qwen2", ""), ("faq4", "")),
    ],
)
def test_quantization_of_a_file_name(stem: str, found: str) -> None:
    assert quantization_of(f"{stem}.gguf") == found
