"""`pull --check` and the lines of `list`: newer files of pulled models, and no call that nobody asked for."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from localchat.cli.context import AppContext
from localchat.cli.main import run
from localchat.config.paths import find_paths
from localchat.models.hub.updates import UPDATES_FILE
from tests.support.fake_hub import FakeHub

NAME = "maker/Small-GGUF"
OTHER = "maker/Full"
BODY, NEWER = b"GGUF" + bytes(1_000), b"GGUF" + bytes(999) + b"1"

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(
    hub: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Call:
    hub.add(NAME, {"small-q4_k_m.gguf": BODY, "README.md": b"old"})
    monkeypatch.setenv("LOCALCHAT_MODELS", str(tmp_path / "models"))

    def called(*args: str) -> tuple[int, str, str]:
        return run(args, AppContext()), *capfd.readouterr()

    assert called("pull", "-q", NAME)[0] == 0
    return called


def test_a_newer_file_is_told_until_it_is_pulled(call: Call, hub: FakeHub) -> None:
    assert call("pull", "--check") == (0, f"hf.co/{NAME}:Q4_K_M: up to date\n", "")
    assert "Newer" not in call("list")[1]
    # As many bytes as before, and others; a file that is no part of the model does not count.
    hub.add(NAME, {"small-q4_k_m.gguf": NEWER, "README.md": b"new"})
    code, out, _ = call("pull", "--check", f"hf.co/{NAME}:Q4_K_M")
    assert code == 0
    assert f"newer on the hub; localchat pull hf.co/{NAME}:Q4_K_M fetches it" in out
    before = len(hub.asked)
    listed = call("list")[1]
    assert "Newer on the hub, by the last check:" in listed
    assert f"localchat pull hf.co/{NAME}:Q4_K_M" in listed
    assert json.loads(call("list", "--json")[1])[-1]["newer_on_hub"] is True
    assert len(hub.asked) == before
    assert call("pull", "-q", NAME)[0] == 0
    assert "Newer" not in call("list")[1]
    assert json.loads(call("pull", "--check", "--json")[1])[0]["newer"] is False


def test_one_listing_serves_all_models_of_a_repository(call: Call, hub: FakeHub) -> None:
    files = {"small-q4_k_m.gguf": BODY, "small-q8_0.gguf": BODY + b"8"}
    hub.add(NAME, files)
    assert call("pull", "-q", f"{NAME}:Q8_0")[0] == 0
    before = len(hub.asked)
    code, out, _ = call("pull", "--check", "--json")
    assert (code, len(json.loads(out)), len(hub.asked) - before) == (0, 2, 1)


def test_a_repository_that_is_gone_is_said_and_the_others_are_checked(
    call: Call, hub: FakeHub
) -> None:
    hub.add(OTHER + "-GGUF", {"full-q4_k_m.gguf": BODY})
    assert call("pull", "-q", OTHER + "-GGUF")[0] == 0
    hub.repositories.pop(NAME)
    code, out, _ = call("pull", "--check")
    lines = out.splitlines()
    assert code == 0
    assert f"hf.co/{OTHER}-GGUF:Q4_K_M: up to date" in lines
    assert any(line.startswith(f"hf.co/{NAME}:Q4_K_M: ") and NAME in line[20:] for line in lines)


def test_offline_and_unknown_names_are_refused_without_a_call(call: Call, hub: FakeHub) -> None:
    before = len(hub.asked)
    code, _, err = call("pull", "--check", "--offline")
    assert code == 5
    assert "offline" in err
    code, _, err = call("pull", "--check", "nothing:1b")
    assert code == 3
    assert "not a downloaded model" in err
    code, _, err = call("pull")
    assert code == 2
    assert "--check" in err
    assert len(hub.asked) == before


def test_nothing_pulled_is_said(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCALCHAT_MODELS", str(tmp_path / "empty"))
    code, out, err = call("pull", "--check")
    assert (code, out) == (0, "")
    assert "nothing to check" in err
    assert json.loads(call("pull", "--check", "--json")[1]) == []


def test_a_damaged_record_of_checks_counts_as_none(call: Call, tmp_path: Path) -> None:
    path = find_paths(os.environ).state_dir / UPDATES_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"{torn")
    assert call("list")[0] == 0
    assert call("pull", "--check")[0] == 0
