"""list, show, cp, rm and import, on models of this machine and of other programs."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localchat.config.paths import find_paths
from localchat.history.store import History
from localchat.models.hub.manifest import Manifest, PulledFile, record
from localchat.units import size as size_text
from tests.support import histories
from tests.support.cli_program import SCENARIOS, ScriptedApp
from tests.support.conversations import talk
from tests.support.external_stores import Hub, Ollama, gguf
from tests.support.gguf_files import write_split
from tests.support.terminal_screen import Call, Outcome, Screen

OLLAMA = "registry.ollama.ai/library"
Verb = Callable[..., Outcome]


@pytest.fixture
def home() -> Path:
    return Path(os.environ["HOME"])


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    """The models folder."""
    folder = find_paths(os.environ).models_dir
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def verb(call: Call) -> Verb:
    def called(*args: str | Path, **how: Any) -> Outcome:
        return call(SCENARIOS["hello"], *args, named=False, **how)

    return called


def rows(verb: Verb) -> dict[str, Any]:
    code, out, _ = verb("list", "--json")
    assert code == 0
    return {row["name"]: row for row in json.loads(out)}


# ---------------------------------------------------------------------------- list


def test_list_ends_with_models_that_were_used_by_their_path(
    verb: Verb, models_dir: Path, tmp_path: Path
) -> None:
    gguf(models_dir / "mine.gguf")
    used, gone = gguf(tmp_path / "used.gguf", 2), gguf(tmp_path / "gone.gguf", 3)
    os.link(models_dir / "mine.gguf", tmp_path / "linked.gguf")
    paths = find_paths(os.environ)
    with History.open(paths.data_dir / "history.sqlite3") as history:
        names = (
            gone,
            tmp_path / "linked.gguf",
            used,
            "elsewhere:7b",
            "/no\0file",
            f"/{'long' * 99}",
        )
        for model in map(str, names):
            conversation = talk("hello")
            conversation.model = model
            histories.record(history, conversation, conversation.nodes.values())
    gone.unlink()
    found = rows(verb)
    assert list(found)[-1] == str(used)
    assert (found[str(used)]["kind"], found[str(used)]["origin"]) == ("path", "used by its path")
    assert found[str(used)]["size_bytes"] == used.stat().st_size
    assert found.keys() == {"guide", "mine", str(used)}


def test_list_names_every_origin(verb: Verb, models_dir: Path, home: Path, tmp_path: Path) -> None:
    gguf(models_dir / "mine.gguf")
    Ollama(home / ".ollama/models").model(f"{OLLAMA}/qwen2.5/7b", gguf(tmp_path / "a.gguf", 2))
    gguf(home / ".lmstudio/models/pub/repo/m-Q4_0.gguf", 3)
    found = rows(verb)
    assert {name: row["origin"] for name, row in found.items()} == {
        "guide": "built in",
        "mine": "models folder",
        "ollama/qwen2.5:7b": "Ollama",
        "lmstudio/repo/m-Q4_0": "LM Studio",
    }
    assert found["mine"]["context_tokens"] == 512
    assert found["mine"]["quantization"] == "F16"
    assert found["mine"]["size_bytes"] == (models_dir / "mine.gguf").stat().st_size
    code, out, err = verb("ls")
    assert (code, err) == (0, "")
    assert "ollama/qwen2.5:7b" in out
    assert out.splitlines()[0].split() == ["NAME", "SIZE", "QUANT", "CONTEXT", "ORIGIN"]


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"general__architecture": "gptoss", "gptoss__block_count": 2}, "context_length"),
        ({"general__type": "adapter"}, "adapter"),
        ({"tokenizer__ggml__model": "none"}, "no vocabulary"),
    ],
)
def test_list_says_why_a_file_cannot_be_run(
    extra: dict[str, Any], told: str, verb: Verb, models_dir: Path
) -> None:
    gguf(models_dir / "odd.gguf", **extra)
    row = rows(verb)["odd"]
    assert not row["usable"]
    assert told in row["reason"]
    assert "odd:" in verb("list").out.partition("cannot be run:")[2]


def test_an_architecture_that_this_llama_cpp_does_not_know_is_told(
    verb: Verb, models_dir: Path
) -> None:
    ours = ("block_count", "context_length", "embedding_length", "attention.head_count")
    extra: dict[str, Any] = {f"gptoss__{key.replace('.', '__')}": 2 for key in ours}
    gguf(models_dir / "odd.gguf", general__architecture="gptoss", **extra)
    assert "does not support its architecture, gptoss" in rows(verb)["odd"]["reason"]


def test_a_name_cannot_move_the_cursor(
    verb: Verb, models_dir: Path, screen: Callable[..., Screen]
) -> None:
    gguf(models_dir / "a\x1b[2Jb.gguf")
    shown = screen("hello", "list")
    code, text = shown.finish()
    assert code == 0
    assert "\x1b[2J" not in text
    assert "a\u241b[2Jb" in text


def test_a_name_with_a_newline_is_one_line_of_an_error_and_of_a_message(
    verb: Verb, models_dir: Path, tmp_path: Path
) -> None:
    error = verb("show", "/none\nlocalchat: all is well.gguf").err
    assert error.splitlines()[0].endswith("/none␊localchat: all is well.gguf")
    gguf(models_dir / "more\nlines.gguf")
    assert "Your models: guide, more␊lines. " in verb("show", "nothing").err
    gguf(tmp_path / "two\nlines" / "m.gguf")
    added = verb("import", tmp_path / "two\nlines").err
    assert "two␊lines; models in it: 1" in added


# ---------------------------------------------------------------------------- show


def test_show_tells_facts_and_limits(verb: Verb, models_dir: Path) -> None:
    gguf(models_dir / "m.gguf", architecture="gemma3", general__license="gemma")
    gguf(models_dir / "state.gguf", architecture="mamba")
    seen = json.loads(verb("show", "m", "--json").out)
    assert (seen["license"], seen["architecture"], seen["context_tokens"]) == (
        "gemma",
        "gemma3",
        512,
    )
    # Two layers with a window of 64 tokens: the cache keeps all their tokens, as `fit` counts them.
    assert seen["kv_bytes_per_token"] == 256
    assert any("64 tokens" in sentence for sentence in seen["can"])
    assert any("tools" in sentence for sentence in seen["cannot"])
    state = json.loads(verb("show", "state", "--json").out)
    assert state["state_bytes"] > 0
    assert any("recurrent state" in sentence for sentence in state["cannot"])
    text = verb("show", "m").out
    for part in ("license      gemma", "quantization F16", "origin       models folder"):
        assert part in text


def test_show_template_prints_it_alone(verb: Verb, models_dir: Path) -> None:
    gguf(models_dir / "m.gguf", tokenizer__chat_template="{{ tools }}\nsecond line")
    gguf(models_dir / "bare.gguf", tokenizer__chat_template=" ")
    assert verb("show", "m", "--template").out == "{{ tools }}\nsecond line\n"
    assert any(
        "tools" in sentence for sentence in json.loads(verb("show", "m", "--json").out)["can"]
    )
    code, out, err = verb("show", "bare", "--template")
    assert (code, out) == (1, "")
    assert "no chat template" in err


def test_show_of_what_is_not_here_ends_with_3(verb: Verb) -> None:
    code, out, err = verb("show", "nothing-here")
    assert (code, out) == (3, "")
    assert "nothing-here" in err


# ---------------------------------------------------------------------------- cp


def test_an_alias_runs_lists_and_leaves(call: Call, verb: Verb, home: Path, tmp_path: Path) -> None:
    blob = Ollama(home / ".ollama/models").model(f"{OLLAMA}/qwen2.5/7b", gguf(tmp_path / "a.gguf"))
    assert (
        "fast is now an alias of ollama/qwen2.5:7b" in verb("cp", "ollama/qwen2.5:7b", "fast").err
    )
    assert verb("cp", "fast", "faster").code == 0
    app = ScriptedApp(SCENARIOS["hello"])
    assert call(app, "run", "faster", "hi", named=False).code == 0
    assert (app.options[0].model, app.options[0].name) == (blob, "faster")
    assert rows(verb)["faster"]["alias_of"] == "ollama/qwen2.5:7b"
    assert verb("rm", "fast", "-y").code == 0
    assert "fast" not in rows(verb)
    assert blob.exists()


@pytest.mark.parametrize("name", ["a/b", "../x", "guide", "ollama", "-x", "x.gguf", ""])
def test_a_name_that_means_something_else_is_refused(
    name: str, verb: Verb, models_dir: Path
) -> None:
    gguf(models_dir / "m.gguf")
    assert verb("cp", "m", "--", name).code == 2


def test_a_model_that_has_moved_is_imported_again_under_its_name(
    verb: Verb, tmp_path: Path
) -> None:
    old = gguf(tmp_path / "old.gguf")
    assert verb("import", str(old), "Mine").code == 0
    other = gguf(tmp_path / "other.gguf", 2)
    assert verb("import", str(other), "mine").code == 2
    new = old.rename(tmp_path / "new.gguf")
    assert verb("import", str(new), "mine").code == 0
    assert rows(verb)["mine"]["alias_of"] == str(new)
    assert "Mine" not in rows(verb)


def test_an_alias_does_not_hide_a_model(verb: Verb, models_dir: Path) -> None:
    gguf(models_dir / "m.gguf")
    gguf(models_dir / "n.gguf", 2)
    code, _, err = verb("cp", "m", "n")
    assert code == 2
    assert "n already" in err


# ---------------------------------------------------------------------------- rm


def test_rm_frees_what_it_says(verb: Verb, models_dir: Path) -> None:
    path = gguf(models_dir / "m.gguf")
    size = path.stat().st_size
    code, _, err = verb("rm", "m", "-y")
    assert code == 0
    assert f"m: frees {size_text(size)}" in err
    assert not path.exists()
    assert models_dir.is_dir()


def test_rm_without_a_terminal_wants_yes(verb: Verb, models_dir: Path) -> None:
    path = gguf(models_dir / "m.gguf")
    code, _, err = verb("rm", "m")
    assert code == 2
    assert "--yes" in err
    assert path.exists()


def test_a_pulled_model_leaves_what_its_neighbour_needs(verb: Verb, models_dir: Path) -> None:
    folder = models_dir / "org/repo"
    for seed, name in enumerate(("one", "two")):
        path = gguf(folder / f"{name}.gguf", seed)
        files = [path, folder / "config.json"]
        files[1].write_text("{}")
        pulled = tuple(
            PulledFile(path=file.name, size=file.stat().st_size, sha256="0" * 64) for file in files
        )
        about = {"repository": "org/repo", "revision": "aaa", "quantization": "Q4_K_M"}
        record(
            folder,
            Manifest(name=f"{name}:1b-q4_k_m", format="gguf", files=pulled, pulled_at="", **about),
        )
    assert rows(verb)["one:1b-q4_k_m"]["origin"] == "org/repo"
    assert verb("rm", "one:1b-q4_k_m", "-y").code == 0
    assert set(rows(verb)) == {"guide", "two:1b-q4_k_m"}
    assert (folder / "config.json").exists()
    assert verb("rm", "two:1b-q4_k_m", "-y").code == 0
    assert list(models_dir.iterdir()) == []


@pytest.mark.parametrize("gone", ["qwen2.5:7b-q8_0", "hf.co/a/b:Q8_0"])
def test_rm_of_one_of_two_names_takes_that_name(verb: Verb, models_dir: Path, gone: str) -> None:
    folder = models_dir / "a/b"
    size = gguf(folder / "x.gguf").stat().st_size
    pulled = (PulledFile(path="x.gguf", size=size, sha256="0" * 64),)
    names = ("hf.co/a/b:Q8_0", "qwen2.5:7b-q8_0")
    for name in names:
        about = {"repository": "Qwen/Qwen2.5-7B-Instruct-GGUF", "revision": "r"}
        record(
            folder,
            Manifest(
                name=name, quantization="Q8_0", format="gguf", files=pulled, pulled_at="", **about
            ),
        )
    assert json.loads(verb("show", gone.lower(), "--json").out)["name"] == gone
    code, _, err = verb("rm", gone, "-y")
    assert code == 0 and "another name of it stays" in err
    assert set(names) - rows(verb).keys() == {gone}
    assert (folder / "x.gguf").is_file()


@pytest.mark.parametrize(("answer", "there"), [("n\n", True), ("y\n", False)])
def test_rm_asks_on_a_terminal(
    answer: str, there: bool, models_dir: Path, screen: Callable[..., Screen]
) -> None:
    path = gguf(models_dir / "m.gguf")
    shown = screen("hello", "rm", "m")
    shown.wait_for("Remove?")
    shown.press(answer)
    shown.finish()
    assert path.exists() == there


@pytest.mark.parametrize("word", ["ollama/qwen2.5:7b", "hf/org/repo", "lmstudio/repo/m", "guide"])
def test_rm_touches_nothing_of_others(word: str, verb: Verb, home: Path, tmp_path: Path) -> None:
    Ollama(home / ".ollama/models").model(f"{OLLAMA}/qwen2.5/7b", gguf(tmp_path / "a.gguf"))
    Hub(home / ".cache/huggingface/hub")
    hub = Hub(Path(os.environ["XDG_CACHE_HOME"]) / "huggingface/hub")
    hub.file("org/repo", "aaa", "m-Q8_0.gguf", gguf(tmp_path / "b.gguf", 2))
    gguf(home / ".lmstudio/models/pub/repo/m.gguf", 3)
    before = sorted(path for path in home.rglob("*"))
    assert verb("rm", word, "-y").code == 2
    assert sorted(path for path in home.rglob("*")) == before


def test_rm_of_a_path_outside_the_models_folder_is_refused(verb: Verb, tmp_path: Path) -> None:
    path = gguf(tmp_path / "else/m.gguf")
    assert verb("rm", path, "-y").code == 2
    assert path.exists()


# ---------------------------------------------------------------------------- import


def test_import_gives_a_file_a_name_and_leaves_it_in_place(
    call: Call, verb: Verb, models_dir: Path, tmp_path: Path
) -> None:
    source = gguf(tmp_path / "else/long-name.gguf")
    code, _, err = verb("import", source, "mine")
    assert code == 0
    assert f"mine is {source}, used in place" in err
    app = ScriptedApp(SCENARIOS["hello"])
    assert call(app, "run", "mine", "hi", named=False).code == 0
    assert app.options[0].model == source
    assert "frees 0 B" in verb("rm", "mine", "-y").err
    assert source.exists()
    assert not models_dir.exists() or not any(models_dir.iterdir())


def test_import_refuses_a_path_that_is_not_utf8(verb: Verb, tmp_path: Path) -> None:
    code, _, err = verb("import", gguf(tmp_path / os.fsdecode(b"m\xff.gguf")), "mine")
    assert code == 2
    assert "whose name is not UTF-8 cannot be used here" in err
    assert "mine" not in rows(verb)


def test_import_takes_all_parts_of_a_split_model(call: Call, verb: Verb, tmp_path: Path) -> None:
    parts = write_split(tmp_path, "big", 3)
    assert verb("import", parts[1], "mine").code == 0
    app = ScriptedApp(SCENARIOS["hello"])
    assert call(app, "run", "mine", "hi", named=False).code == 0
    assert app.options[0].model.samefile(parts[0])
    assert rows(verb)["mine"]["size_bytes"] == sum(part.stat().st_size for part in parts)


def test_import_refuses_what_is_no_model_and_a_name_that_is_taken(
    verb: Verb, models_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.gguf").write_text("hello")
    assert verb("import", tmp_path / "text.gguf").code == 1
    assert verb("import", tmp_path / "nothing.gguf").code == 3
    gguf(models_dir / "mine.gguf")
    code, _, err = verb("import", gguf(tmp_path / "x.gguf", 2), "mine")
    assert code == 2
    assert "already" in err


def test_a_folder_is_looked_into_until_it_is_forgotten(verb: Verb, tmp_path: Path) -> None:
    path = gguf(tmp_path / "disk/m.gguf")
    assert "models in it: 1\n  folder/m" in verb("import", tmp_path / "disk").err
    assert rows(verb)["folder/m"]["path"] == str(path)
    assert f"added folder {tmp_path / 'disk'}" in verb("import", tmp_path / "disk").err
    assert verb("import", tmp_path / "disk", "--forget").code == 0
    assert set(rows(verb)) == {"guide"}
    assert verb("import", tmp_path / "disk", "--forget").code == 2
    assert path.exists()


def test_the_same_import_again_is_no_error(verb: Verb, models_dir: Path, tmp_path: Path) -> None:
    path = gguf(tmp_path / "mine.gguf")
    first = verb("import", path, "mine")
    again = verb("import", path, "mine")
    assert (first.code, again.code) == (0, 0), again.err
    assert "imported already" in again.err
    other = gguf(tmp_path / "other.gguf")
    assert verb("import", other, "mine").code == 2


def test_rm_of_an_alias_of_nothing_does_not_say_that_its_model_stays(
    verb: Verb, models_dir: Path, tmp_path: Path
) -> None:
    path = gguf(tmp_path / "mine.gguf")
    assert verb("cp", path, "short").code == 0
    assert "stays" in verb("rm", "short").err
    path.unlink()
    removed = verb("rm", "--yes", "short")
    assert removed.code == 0
    assert "is gone already" in removed.err


# ---------------------------------------------------------------------------- completion


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("localchat run mi", "plain,mine"),
        ("localchat -m mi", "plain,mine"),
        ("localchat run guide --draft mi", "plain,mine"),
        ("localchat show mi", "plain,mine"),
        ("localchat run ./mi", "file,./mi"),
        ("localchat -f mi", "file,mi"),
        ("localchat --schema mi", "file,mi"),
        ("localchat learn mi", "file,mi"),
    ],
)
def test_a_shell_completes_models_and_files(
    verb: Verb, models_dir: Path, monkeypatch: pytest.MonkeyPatch, words: str, completed: str
) -> None:
    gguf(models_dir / "mine.gguf")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    monkeypatch.setenv("_LOCALCHAT_COMPLETE", "bash_complete")
    assert verb().out.splitlines() == [completed]
