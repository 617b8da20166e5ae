"""`localchat pull` as people and scripts use it: streams, exit codes, offline, and a chat afterwards."""

import io
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from localchat.cli.context import AppContext
from localchat.cli.main import run
from localchat.config.paths import find_paths
from tests.support.fake_hub import FakeHub, Fault, listing_of, sha256
from tests.support.gguf_files import Size, write_split
from tests.support.terminal_screen import Screen

pytestmark = pytest.mark.usefixtures("one_thread")

README = Path(__file__).parents[3] / "README.md"
NAME = "maker/Small-GGUF"
BODY = b"GGUF" + bytes(1_000)

Outcome = tuple[int, str, str]
Call = Callable[..., Outcome]


@pytest.fixture
def call(
    hub: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Call:
    hub.add(NAME, {"small-q4_k_m.gguf": BODY})
    monkeypatch.setenv("LOCALCHAT_MODELS", str(tmp_path / "models"))

    def called(*args: str) -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        return run(args, AppContext()), *capfd.readouterr()

    return called


def test_sentences_go_to_stderr_and_stdout_stays_empty(call: Call) -> None:
    code, out, err = call("pull", NAME)
    assert (code, out) == (0, "")
    assert f"hf.co/{NAME}:Q4_K_M from {NAME}: 1.0 kB" in err
    assert f"localchat run hf.co/{NAME}:Q4_K_M" in err
    assert "\x1b" not in err and "\r" not in err
    assert call("pull", "-q", NAME) == (0, "", "")


def test_json_is_one_event_in_a_line(call: Call) -> None:
    code, out, err = call("pull", "--json", NAME)
    events = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "")
    names = [event["event"] for event in events]
    assert names == ["note", "found", "progress", "progress", "done"]
    assert "unknown whether the model will run here" in events[0]["text"]
    assert events[1]["total_bytes"] == events[3]["done_bytes"] == len(BODY)
    assert Path(events[-1]["path"]).read_bytes() == BODY


def test_failure_is_an_event_too_and_the_exit_code_says_network(call: Call, hub: FakeHub) -> None:
    hub.faults.extend([Fault(flip=7), Fault(flip=7)])
    code, out, err = call("pull", "--json", NAME)
    last = json.loads(out.splitlines()[-1])
    assert code == 5
    assert (last["event"], last["code"]) == ("error", "network")
    assert sha256(BODY) in last["message"] and sha256(BODY) in err


def test_terminal_gets_one_bar_with_size_rate_and_time_left(call: Call, hub: FakeHub) -> None:
    seen = threading.Event()
    hub.faults.append(Fault(pause_s=0.15, pause_every=1, until=seen))
    screen = Screen(["-m", "localchat", "pull", NAME], term="xterm")
    try:
        assert "1.0 kB" in screen.wait_for("left")
        seen.set()
        code, rest = screen.finish()
    finally:
        screen.close()
    assert code == 0
    assert f"localchat run hf.co/{NAME}:Q4_K_M" in rest


def test_ctrl_c_keeps_what_came_and_says_so(call: Call, hub: FakeHub, tmp_path: Path) -> None:
    over = threading.Event()
    hub.faults.append(Fault(pause_s=3600.0, pause_every=300, until=over))
    screen = Screen(["-m", "localchat", "pull", NAME], term="xterm")
    try:
        screen.wait_for("kB")
        screen.wait_for("kB")
        screen.press("\x03")
        code, rest = screen.finish()
    finally:
        screen.close()
        over.set()
    assert code == 130
    assert f"localchat pull {NAME} resumes the download" in rest
    assert (tmp_path / "models" / NAME / "small-q4_k_m.gguf.part").stat().st_size == 300


@pytest.mark.parametrize(
    ("word", "code", "told"),
    [
        ("qwen2.5:7c", 3, "qwen2.5:7b"),
        ("qwen2.5", 2, "qwen2.5:14b"),
        ("qwen2.5:7b-q99", 3, "qwen2.5:7b-q4_k_m"),
        ("wholly-unlike-anything", 3, "names look like qwen2.5:7b-q4_k_m"),
        ("../../etc/passwd", 2, "is not the name of a repository"),
        ("hf.co/../x", 2, "is not the name of a repository"),
        ("maker/none", 3, "no repository"),
        ("guide", 3, "run it: localchat run guide"),
    ],
)
def test_name_that_is_unknown_or_ambiguous_says_the_nearest(
    call: Call, word: str, code: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a word that is a path there means the file
    found, out, err = call("pull", word)
    assert (found, out) == (code, "")
    assert told in err


def test_several_files_of_one_quantization_are_named(call: Call, hub: FakeHub) -> None:
    hub.add("maker/two", {"a-Q4_0.gguf": b"GGUF", "b-Q4_0.gguf": b"GGUF"})
    code, _, err = call("pull", "maker/two")
    assert code == 2
    assert "maker/two holds 2 files of Q4_0" in err
    assert "a-Q4_0, b-Q4_0" in err


@pytest.mark.parametrize(
    ("variable", "flag"),
    [
        ("LOCALCHAT_OFFLINE", ""),
        ("HF_HUB_OFFLINE", ""),
        ("TRANSFORMERS_OFFLINE", ""),
        ("", "--offline"),
    ],
)
def test_offline_asks_nobody_and_is_content_with_what_is_here(
    call: Call, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, variable: str, flag: str
) -> None:
    args = ("pull", f"hf.co/{NAME}:q4_k_m", *([flag] if flag else []))
    if variable:
        monkeypatch.setenv(variable, "1")
    code, _, err = call(*args)
    assert code == 5
    assert f"offline is set ({variable or flag})" in err
    assert hub.asked == []
    if variable:
        monkeypatch.delenv(variable)
    assert call("pull", NAME)[0] == 0
    if variable:
        monkeypatch.setenv(variable, "1")
    asked = len(hub.asked)
    assert call(*args)[0] == 0
    assert len(hub.asked) == asked


def test_model_that_is_known_and_not_here_names_the_command(call: Call) -> None:
    code, out, err = call("run", "qwen2.5:7b", "hi")
    assert (code, out) == (3, "")
    assert "localchat pull qwen2.5:7b-q4_k_m" in err
    code, _, err = call("run", NAME, "hi")
    assert code == 3
    assert f"localchat pull hf.co/{NAME}" in err


def test_a_file_without_a_hash_is_not_called_verified(call: Call, hub: FakeHub) -> None:
    repository = hub.add("maker/Bare-GGUF", {"bare-q4_k_m.gguf": BODY}, large=frozenset())
    repository.listing = listing_of("maker/Bare-GGUF", repository)
    repository.listing["siblings"][0].pop("blobId")
    code, _, err = call("pull", "maker/Bare-GGUF")
    assert code == 0
    assert "verified" not in err
    assert "the hub has no hash to verify it" in err


def test_a_file_that_is_no_gguf_ends_with_an_error(call: Call, hub: FakeHub) -> None:
    hub.add("maker/Page-GGUF", {"page-q4_k_m.gguf": b"<html>log in</html>"})
    code, _, err = call("pull", "maker/Page-GGUF")
    assert code == 1
    assert "page-q4_k_m.gguf is not a GGUF file" in err
    assert "verified" not in err


def test_a_path_to_another_kind_of_file_is_not_called_a_model(call: Call, tmp_path: Path) -> None:
    (tmp_path / "passwd").write_text("root")
    code, _, err = call("pull", str(tmp_path / "x" / ".." / "passwd").replace("/x/..", ""))
    assert code == 2
    assert "is not the name of a repository" in err
    assert "run it" not in err


def test_a_pull_asks_the_hub_for_nothing_but_the_model(
    call: Call, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """huggingface-hub would ask for a list of programs to recognize."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    done = subprocess.run(
        [sys.executable, "-m", "localchat", "pull", NAME],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert hub.requests("other") == []
    agents = {one.headers.get("User-Agent", "") for one in hub.asked}
    assert not any("torch/" in agent or "agent/" in agent for agent in agents)


def test_users_models_toml_adds_names_and_wins(call: Call) -> None:
    import os

    own = find_paths(os.environ).settings_file.with_name("models.toml")
    own.parent.mkdir(parents=True, exist_ok=True)
    body = (
        'parameters = 1_000_000\ncontext_tokens = 512\nlicense = "MIT"\nabout = "x"\nuses = ["chat"]\n'
        f'sources = [{{ repository = "{NAME}", format = "gguf", quantizations = ["Q4_K_M"] }}]\n'
    )
    own.write_text(f'[models."mine:1m"]\n{body}[models."qwen2.5:7b"]\n{body}')
    for word in ("mine:1m", "mine", "qwen2.5:7b"):
        assert call("pull", word)[0] == 0
    own.write_text('[models."Mine"]\n')
    code, _, err = call("pull", "mine:1m")
    assert code == 2
    assert str(own) in err and '"Mine"' in err


def test_example_of_the_readme_pulls_and_then_chats(
    call: Call, hub: FakeHub, tmp_path: Path
) -> None:
    assert "localchat pull qwen3.5:4b" in README.read_text(encoding="utf-8")
    parts = write_split(tmp_path, "Qwen3.5-4B-Q4_K_M", 2, Size())
    hub.add("unsloth/Qwen3.5-4B-GGUF", {part.name: part.read_bytes() for part in parts})
    assert call("pull", "qwen3.5:4b")[0] == 0
    code, out, err = call("run", "qwen3.5:4b", "--json", "--max-tokens", "3", "hi")
    assert code == 0, err
    answer = json.loads(out)
    assert answer["model"] == "qwen3.5:4b-q4_k_m"
    assert 1 <= answer["usage"]["completion_tokens"] <= 3


def test_example_of_the_readme_as_a_program(
    call: Call, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guide stands in behind the name; every byte and every process is real."""
    import localchat

    guide = Path(localchat.__file__).with_name("guide") / "guide.gguf"
    name = "qwen2.5-7b-instruct-q4_k_m.gguf"
    hub.add("Qwen/Qwen2.5-7B-Instruct-GGUF", {name: guide.read_bytes()})
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")

    def program(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "localchat", *args],
            capture_output=True,
            text=True,
            timeout=600,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    pulled = program("pull", "qwen2.5:7b-q4_k_m")
    assert (pulled.returncode, pulled.stdout) == (0, ""), pulled.stderr
    assert "qwen2.5:7b-q4_k_m will fit: " in pulled.stderr
    assert "downloaded and verified: localchat run qwen2.5:7b-q4_k_m" in pulled.stderr
    listed = program("list")
    assert "qwen2.5:7b-q4_k_m" in listed.stdout
    answer = program(
        "run", "qwen2.5:7b", "--temperature", "0", "--max-tokens", "24", "What is a KV cache?"
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()
    # Named once, it is the model of the next prompt.
    again = program("--json", "--max-tokens", "4", "And who are you?")
    assert json.loads(again.stdout)["model"] == "qwen2.5:7b-q4_k_m"
    missing = program("run", "qwen2.5:14b", "hi")
    assert missing.returncode == 3
    assert "download it: localchat pull qwen2.5:14b-q4_k_m" in missing.stderr


def test_file_that_is_here_is_no_matter_of_the_hub(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "here.gguf"
    path.write_bytes(BODY)
    code, _, err = call("pull", str(path))
    assert code == 3
    assert f"run it: localchat run {path}" in err
    assert call("pull", str(tmp_path / "not-here.gguf"))[0] == 2


def test_run_offers_a_model_that_is_not_here_and_goes_on(call: Call, hub: FakeHub) -> None:
    import localchat

    guide = Path(localchat.__file__).with_name("guide") / "guide.gguf"
    hub.add("maker/Guide-GGUF", {"guide-q4_k_m.gguf": guide.read_bytes()})
    args = ("-m", "localchat", "run", "maker/Guide-GGUF", "--max-tokens", "4", "hi")
    screen = Screen(list(args), term="xterm")
    try:
        screen.wait_for("Download it (15 MB)? [Y/n]")
        screen.press("n\n")
        code, seen = screen.finish()
        assert (code, hub.requests("store")) == (3, [])
        assert "download it: localchat pull hf.co/maker/Guide-GGUF" in seen
    finally:
        screen.close()
    screen = Screen(list(args), term="xterm")
    try:
        screen.wait_for("[Y/n]")
        screen.press("\n")
        screen.wait_for("is downloaded and verified")
        assert screen.finish()[0] == 0
    finally:
        screen.close()
    assert "hf.co/maker/Guide-GGUF:Q4_K_M" in call("list")[1]


def test_run_without_a_model_lets_the_user_pick_one_that_runs(
    call: Call, hub: FakeHub, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "broken.gguf").write_text("no model")
    assert "broken" in call("list")[1]
    screen = Screen(["-m", "localchat", "run", "--max-tokens", "2"], term="dumb")
    try:
        offered = screen.wait_for("Number or name")
        assert "guide" in offered and "broken" not in offered
        screen.press("99\n1\n")
        screen.wait_for("guide; /help lists the commands")
        screen.wait_for("> ")
        screen.press("\x04")
        assert screen.finish()[0] == 0
    finally:
        screen.close()


def test_ctrl_c_at_a_question_ends_its_line(call: Call) -> None:
    screen = Screen(["-m", "localchat", "run"], term="dumb")
    try:
        screen.wait_for("Number or name [1]: ")
        screen.interrupt()
        code, shown = screen.finish()
        assert code == 130
        assert shown.endswith("\n")
    finally:
        screen.close()
