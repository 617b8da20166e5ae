"""Names: what each means, what nobody knows, and which pulled model is meant."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localchat.config.paths import Paths
from localchat.errors import LocalchatError, ModelMissing, UsageError
from localchat.models.aliases import add_alias, read_aliases
from localchat.models.catalog import CatalogEntry, read_models, shipped_file
from localchat.models.hub.manifest import Manifest, PulledFile, record
from localchat.models.hub.safe_paths import check_path
from localchat.models.names import parse
from localchat.models.quantizations import gguf_variants, is_quantization, quantization_of
from localchat.models.resolve import (
    IN_COMMAND,
    last_model,
    locate,
    locate_default,
    locate_named,
    remember_model,
)

CATALOGUE: dict[str, CatalogEntry] = read_models(shipped_file())


@pytest.mark.parametrize(
    ("word", "name", "repository", "quantization"),
    [
        ("qwen2.5:7b", "qwen2.5:7b-q4_k_m", "Qwen/Qwen2.5-7B-Instruct-GGUF", "Q4_K_M"),
        ("qwen2.5:7b-Q8_0", "qwen2.5:7b-q8_0", "Qwen/Qwen2.5-7B-Instruct-GGUF", "Q8_0"),
        ("QWEN2.5:7B", "qwen2.5:7b-q4_k_m", "Qwen/Qwen2.5-7B-Instruct-GGUF", "Q4_K_M"),
        ("qwen2.5:7b-awq", "qwen2.5:7b-awq", "Qwen/Qwen2.5-7B-Instruct-AWQ", "AWQ"),
        (
            "qwen2.5:7b-gptq-int4",
            "qwen2.5:7b-gptq-int4",
            "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4",
            "GPTQ-Int4",
        ),
        ("qwen2.5:7b-iq3_xxs", "qwen2.5:7b-iq3_xxs", "Qwen/Qwen2.5-7B-Instruct-GGUF", "IQ3_XXS"),
        ("gpt-oss:20b", "gpt-oss:20b-mxfp4", "ggml-org/gpt-oss-20b-GGUF", "MXFP4"),
        ("smollm3", "smollm3:3b-q4_k_m", "ggml-org/SmolLM3-3B-GGUF", "Q4_K_M"),
        ("smollm3:latest", "smollm3:3b-q4_k_m", "ggml-org/SmolLM3-3B-GGUF", "Q4_K_M"),
        ("hf.co/a/b", "hf.co/a/b", "a/b", None),
        ("a/b:q8_0", "hf.co/a/b:q8_0", "a/b", "q8_0"),
        ("https://huggingface.co/a/b/", "hf.co/a/b", "a/b", None),
        ("https://huggingface.co/a/b/tree/main", "hf.co/a/b", "a/b", None),
        ("https://huggingface.co/a/b/blob/main/x-Q4_0.gguf", "hf.co/a/b:x-Q4_0", "a/b", "x-Q4_0"),
        (
            "https://huggingface.co/a/b/resolve/main/x.gguf?download=true",
            *("hf.co/a/b:x", "a/b", "x"),
        ),
        ("https://huggingface.co/a/b/blob/main/config.json", "hf.co/a/b", "a/b", None),
        ("hf.co/a/b:latest", "hf.co/a/b", "a/b", None),
        ("hf.co/a/b/x-Q4_0.gguf", "hf.co/a/b:x-Q4_0", "a/b", "x-Q4_0"),
        (
            "https://huggingface.co/a/b/blob/main/Q8_0/x-Q8_0-00002-of-00003.gguf",
            *("hf.co/a/b:x-Q8_0", "a/b", "x-Q8_0"),
        ),
    ],
)
def test_name_means_a_repository_and_a_quantization(
    word: str, name: str, repository: str, quantization: str | None
) -> None:
    assert parse(word, CATALOGUE)[:3] == (name, repository, quantization)


def test_longest_name_wins_over_a_name_with_a_quantization() -> None:
    found = parse("qwen3:4b-instruct-2507-q8_0", CATALOGUE)
    assert found.name == "qwen3:4b-instruct-2507-q8_0"


@pytest.mark.parametrize(
    "word",
    [
        *(
            "https://hf.co/a/b/blob/main/../x.gguf",
            "hf.co/a/b/blob/main/sub/../x.gguf",
            "hf.co/a/b/blob/other/x.gguf",
            "a/b/tree/main",
        ),
        *("https://hf.co/a", "https://hf.co/", "hf.co/a/../blob/main/x.gguf"),
        *("a/b/c", "a/", "/b", "a/..", "../b", "a/.b", "a/b:../c", "a b/c", "a/b:"),
    ],
)
def test_word_that_names_no_repository_is_a_usage_error(word: str) -> None:
    with pytest.raises(UsageError):
        parse(word, CATALOGUE)


def test_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ModelMissing) as caught:
        parse("qwen2.5-codr:7b", CATALOGUE)
    assert "qwen2.5-coder:7b" in caught.value.hint


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=30))
def test_any_word_is_a_repository_of_two_parts_or_an_error(word: str) -> None:
    try:
        found = parse(word, CATALOGUE)
    except LocalchatError:
        return
    owner, name = found.repository.split("/")
    assert not {owner, name} & {"", ".", ".."}
    assert Path("/m", owner, name).resolve().is_relative_to("/m")


@given(st.text(alphabet="ab./\\:~\0\n ", max_size=20))
def test_path_that_is_accepted_stays_inside(text: str) -> None:
    try:
        found = check_path(f"{text}.gguf")
    except LocalchatError:
        return
    assert (Path("/m/o/r") / found).resolve().is_relative_to("/m/o/r")
    assert "\\" not in str(found)


@pytest.mark.parametrize(
    "path", ["run.py", "a.bin", "model.safetensors.py", "pickle.pt", "README.md"]
)
def test_unknown_kind_of_file_is_refused(path: str) -> None:
    with pytest.raises(LocalchatError, match="only weights"):
        check_path(path)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("qwen2.5-7b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("Meta-Llama-3.1-8B-Instruct.IQ4_XS.gguf", "IQ4_XS"),
        ("Q8_0/Big-Q8_0-00001-of-00002.gguf", "Q8_0"),
        ("Qwen3-30B-A3B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("model-bf16.gguf", "BF16"),
        ("whatever.gguf", ""),
        ("SEQ8-model.gguf", ""),
    ],
)
def test_quantization_is_read_from_the_name(path: str, found: str) -> None:
    assert quantization_of(path) == found
    assert not found or is_quantization(found)


def test_projectors_and_matrices_are_no_models() -> None:
    paths = ["mmproj-F16.gguf", "a-imatrix.gguf", "a-Q4_0.gguf", "a.txt"]
    assert [one.files for one in gguf_variants(paths)] == [("a-Q4_0.gguf",)]


def test_heads_that_only_draft_are_no_models() -> None:
    paths = ["a-Q8_0.gguf", "mtp-a-Q8_0.gguf", "MTP/a-MTP-Q8_0.gguf", "a-DFlash2-Q8_0.gguf"]
    assert [one.files for one in gguf_variants(paths)] == [("a-Q8_0.gguf",)]
    assert gguf_variants(["a-MTP-Q8_0.gguf"])[0].quantization == "Q8_0"


# ---------------------------------------------------------------------------- what is here


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(
        tmp_path / "config" / "settings.toml",
        *(tmp_path / name for name in ("d", "s", "c", "models")),
    )


def put(paths: Paths, name: str, repository: str, quantization: str) -> Path:
    folder = paths.models_dir / repository
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"x-{quantization}.gguf"
    file.write_bytes(b"GGUF")
    part = PulledFile(path=file.name, size=4, sha256="0" * 64)
    record(
        folder,
        Manifest(
            name=name,
            repository=repository,
            revision="r",
            quantization=quantization,
            format="gguf",
            files=(part,),
            pulled_at="",
        ),
    )
    return file


@pytest.mark.parametrize(
    "word",
    [
        "qwen2.5:7b-q8_0",
        "qwen2.5:7b",
        "qwen2.5",
        "Qwen2.5:7B",
        "hf.co/Qwen/Qwen2.5-7B-Instruct-GGUF:Q8_0",
        "qwen/qwen2.5-7b-instruct-gguf",
    ],
)
def test_only_model_that_is_here_is_found_by_all_its_names(paths: Paths, word: str) -> None:
    file = put(paths, "qwen2.5:7b-q8_0", "Qwen/Qwen2.5-7B-Instruct-GGUF", "Q8_0")
    found = locate(word, paths, "why")
    assert (found.path, found.name) == (file, "qwen2.5:7b-q8_0")


def test_default_quantization_is_meant_where_several_are_here(paths: Paths) -> None:
    repository = "Qwen/Qwen2.5-7B-Instruct-GGUF"
    put(paths, "qwen2.5:7b-q8_0", repository, "Q8_0")
    put(paths, "qwen2.5:7b-q2_k", repository, "Q2_K")
    with pytest.raises(UsageError) as caught:
        locate("qwen2.5:7b", paths, "why")
    assert "qwen2.5:7b-q2_k, qwen2.5:7b-q8_0" in caught.value.hint
    file = put(paths, "qwen2.5:7b-q4_k_m", repository, "Q4_K_M")
    assert locate("qwen2.5:7b", paths, "why").path == file


def test_model_with_a_lost_file_is_to_be_pulled_again(paths: Paths) -> None:
    put(paths, "qwen2.5:7b-q8_0", "Qwen/Qwen2.5-7B-Instruct-GGUF", "Q8_0").unlink()
    with pytest.raises(ModelMissing) as caught:
        locate("qwen2.5:7b", paths, "why")
    assert caught.value.hint.endswith("localchat pull qwen2.5:7b-q8_0")


def test_unknown_word_names_what_is_like_it(paths: Paths) -> None:
    put(paths, "hf.co/maker/tinyling:Q8_0", "maker/tinyling", "Q8_0")
    with pytest.raises(ModelMissing) as caught:
        locate("qwen2.5:77b", paths, "why")
    assert "qwen2.5:7b" in caught.value.hint


def test_unknown_quantization_names_those_there_are(paths: Paths) -> None:
    with pytest.raises(ModelMissing) as caught:
        locate("qwen2.5:7b-q9", paths, "why")
    assert "there are qwen2.5:7b-q2_k, " in caught.value.hint
    assert "qwen2.5:7b-awq" in caught.value.hint


@pytest.mark.parametrize("word", ["", " "])
def test_an_empty_name_is_told_to_be_empty(paths: Paths, word: str) -> None:
    with pytest.raises(UsageError, match="cannot be empty"):
        locate(word, paths, "why")


@pytest.mark.parametrize("word", ["~nobody-of-this-name/a.gguf", "x" * 300, f"./{'x' * 300}.gguf"])
def test_a_path_that_cannot_be_there_is_told(paths: Paths, word: str) -> None:
    with pytest.raises(ModelMissing, match=r"there is no file|cannot be read"):
        locate(word, paths, "why")


def test_a_damaged_file_of_aliases_does_not_matter_for_a_path(paths: Paths) -> None:
    paths.data_dir.mkdir(parents=True)
    (paths.data_dir / "bookmarks.json").write_bytes(bytes(300))
    file = put(paths, "x", "a", "q8_0")
    assert locate(str(file), paths, "why").path == file
    with pytest.raises(LocalchatError, match="cannot be read"):
        locate("x", paths, "why")


def test_an_address_as_a_model_names_the_flag_for_servers(paths: Paths) -> None:
    with pytest.raises(ModelMissing) as caught:
        locate("http://127.0.0.1:8000/v1", paths, "why")
    assert "--remote http://127.0.0.1:8000/v1" in caught.value.hint
    with pytest.raises(ModelMissing) as caught:
        locate("https://huggingface.co/a/b", paths, "why")
    assert "localchat pull hf.co/a/b" in caught.value.hint


def test_file_of_the_models_folder_is_found_in_any_letters(paths: Paths) -> None:
    (paths.models_dir / "two").mkdir(parents=True)
    files = [paths.models_dir / name for name in ("Tiny-Q8_0.gguf", "two/a.gguf", "two/A.gguf")]
    for file in files:
        file.write_bytes(b"GGUF")
    assert locate("tiny-q8_0", paths, "why").path == files[0]
    assert locate("two/A", paths, "why").path == files[2]
    with pytest.raises(ModelMissing):
        locate("Two/a", paths, "why")  # it may mean either
    assert locate_named("TINY-q8_0", paths, "why", {}).path == files[0]


def test_unknown_word_names_files_and_what_a_folder_holds(paths: Paths) -> None:
    put(paths, "hf.co/maker/tinyling:Q8_0", "maker/tinyling", "Q8_0")
    (paths.models_dir / "two").mkdir(parents=True)
    for name in ("Tiny.gguf", "two/a.gguf", "two/b.gguf"):
        (paths.models_dir / name).write_bytes(b"GGUF")
    add_alias(paths, "mine", "guide")
    with pytest.raises(ModelMissing) as caught:
        locate("two", paths, "why")
    assert "the nearest names: two/a, two/b" in caught.value.hint.splitlines()
    with pytest.raises(ModelMissing) as caught:
        locate("tinny", paths, "why")
    near, commands = caught.value.hint.splitlines()
    assert near == "the nearest names: Tiny, hf.co/maker/tinyling:Q8_0"
    assert (
        "Your models: Tiny, guide, " in commands
        and " mine" in commands
        and "localchat pull NAME" in commands
    )


def test_a_name_of_the_catalogue_leads_to_the_file_that_is_here(paths: Paths) -> None:
    file = paths.models_dir.parent / "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"GGUF")
    add_alias(paths, "coder", str(file))
    with pytest.raises(ModelMissing) as caught:
        locate("qwen2.5-coder:1.5b", paths, "why")
    assert caught.value.hint.splitlines() == [
        "the same model is here under another name: coder",
        "download it: localchat pull qwen2.5-coder:1.5b-q4_k_m",
    ]


def test_the_name_of_a_family_leads_to_its_files_that_are_here(paths: Paths) -> None:
    file = paths.models_dir.parent / "m.gguf"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"GGUF")
    add_alias(paths, "Qwen2.5-mine", str(file))
    with pytest.raises(UsageError, match="is a family") as caught:
        locate("Qwen2.5", paths, "why")
    here, names = caught.value.hint.splitlines()
    assert here == "on this machine: Qwen2.5-mine"
    assert names.startswith("name one: qwen2.5:")


def test_an_alias_is_the_name_that_is_shown_and_its_model_keeps_its_settings(paths: Paths) -> None:
    file = paths.models_dir.parent / "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"GGUF")
    add_alias(paths, "Coder", str(file))
    for typed in ("Coder", "coder", "CODER"):
        for model in (locate(typed, paths, "why"), locate_named(typed, paths, "why", {})):
            assert (model.name, model.word, model.path) == ("Coder", "Coder", file)
            assert model.names == ("Qwen2.5-Coder-1.5B-Instruct-Q4_K_M", "Coder")
    add_alias(paths, "CODER", "guide")
    assert locate("CODER", paths, "why").target == "guide"
    assert locate("Coder", paths, "why").path == file
    with pytest.raises(ModelMissing):
        locate("coder", paths, "why")


def test_a_file_that_has_moved_is_named_with_its_alias_and_the_way_to_repair_it(
    paths: Paths,
) -> None:
    add_alias(paths, "coder", "/nowhere/coder.gguf")
    with pytest.raises(ModelMissing) as caught:
        locate("coder", paths, IN_COMMAND)
    assert caught.value.message == "there is no file /nowhere/coder.gguf (the alias coder)"
    assert caught.value.hint == "if it has moved: localchat import PATH coder"


def test_the_guide_says_that_it_answers_for_a_model_that_is_gone(paths: Paths) -> None:
    assert locate_default(None, "", paths).notice == ""
    add_alias(paths, "coder", "guide")
    remember_model(locate("coder", paths, "why"), paths)
    assert locate_default(None, "", paths).notice == ""
    add_alias(paths, "coder", "/nowhere/coder.gguf")
    guide = locate_default(None, "", paths)
    assert guide.notice == "coder, the model used last, is not here any more; the guide answers"
    assert guide.name == "guide"


def test_aliases_that_are_added_at_once_are_all_stored(paths: Paths) -> None:
    names = [f"coder{number}" for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: add_alias(paths, name, "guide"), names))
    assert set(read_aliases(paths).aliases) == set(names)


def test_a_name_of_zeros_which_a_power_failure_left_counts_as_no_name(paths: Paths) -> None:
    remember_model(locate_default(None, "", paths), paths)
    (path,) = paths.state_dir.glob("last-model")
    path.write_bytes(bytes(100))
    assert last_model(paths) is None
    assert locate_default(None, "", paths).notice == ""


def test_the_nearest_names_begin_with_the_models_that_are_here(paths: Paths) -> None:
    paths.models_dir.mkdir(parents=True, exist_ok=True)
    (paths.models_dir / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelMissing) as caught:
        locate("qwen25-coder", paths, "why")
    near = caught.value.hint.splitlines()[0]
    assert near.startswith("the nearest names: qwen2.5-coder-1.5b-instruct-q4_k_m, ")


def test_manifest_that_names_a_file_outside_counts_as_none(paths: Paths) -> None:
    put(paths, "evil:1b-q8_0", "maker/evil", "Q8_0")
    manifest = paths.models_dir / "maker/evil/localchat.json"
    manifest.write_text(manifest.read_text().replace("x-Q8_0.gguf", "../../../x.gguf"))
    with pytest.raises(ModelMissing):
        locate("evil:1b-q8_0", paths, "why")


def test_shown_name_of_a_file_can_be_encoded(paths: Paths, tmp_path: Path) -> None:
    file = tmp_path / b"m\xfe.gguf".decode(errors="surrogateescape")
    file.touch()
    model = locate(str(file), paths, "test")
    assert model.name == "m\ufffd"
    assert model.path == file
