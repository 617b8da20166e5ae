"""Settings and parameters are shown with labels, units, and the value that is in force."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot

from localchat.config.parameters import PARAMETERS
from localchat.config.settings import Settings
from localchat.tui.setting_labels import LABELS, effective_words, setting_line, value_words
from tests.support.tui_stage import INFO, Stage, app_of, play, until


def test_every_setting_has_a_label_but_switches_for_tests() -> None:
    assert set(PARAMETERS) - set(LABELS) == {"dummy_weights"}
    groups = [label.group for label in LABELS.values()]
    assert sum(a != b for a, b in pairwise(groups)) == len(set(groups)) - 1


@pytest.mark.parametrize("key", LABELS)
def test_a_label_and_its_value_are_apart(key: str) -> None:
    assert f"{LABELS[key].text}  " in setting_line(key, "no", "bold", 80).plain


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("context_length", None, "32,768 tokens, as many as fit"),
        ("context_length", 4096, "32,768 tokens"),
        ("kv_cache_type", None, "f16, chosen for this model"),
        ("threads", 0, "8, every physical core"),
        ("gpu_layers", "auto", "0 of 29, chosen for this model"),
        ("temperature", None, "0.6, recommended for this model"),
        ("temperature", 0.3, "0.3"),
        ("top_p", None, "0.95, default"),
        ("top_k", None, "off"),
        ("seed", None, "random"),
        ("max_tokens", 2000, "2,000 tokens"),
        ("speculation", True, "yes"),
    ],
)
def test_the_value_in_force_and_who_chose_it(key: str, value: object, words: str) -> None:
    settings = msgspec.structs.replace(Settings(), **{key: value})
    info = msgspec.structs.replace(INFO, sampling={"temperature": 0.7, "top_p": 0.95})
    assert effective_words(key, settings, info, {"temperature": 0.6}) == words


def test_a_default_that_nobody_tells_is_not_guessed() -> None:
    assert effective_words("top_p", Settings(), INFO, {}) == "model default"
    assert effective_words("temperature", Settings(), None, {}) == "model default"


def test_values_have_units() -> None:
    assert value_words("keep_alive", 300) == "5 min 00 s"
    assert value_words("keep_alive", -1) == "forever"
    assert value_words("vram_gb", 6.5) == "6.5 GB"
    assert value_words("stop", ("END",)) == '["END"]'
    assert value_words("experts_on_cpu", 12) == "12 layers"
    assert value_words("experts_on_cpu", "auto") == "as few as possible"
    assert value_words("gpu_layers", "auto") == "as many as fit"
    assert value_words("theme", "auto") == "auto"


def test_on_a_server_only_its_parameters_are_offered(tmp_path: Path) -> None:
    remote = msgspec.structs.replace(INFO, backend="remote", kv_type="", threads=0)

    async def what(pilot: Pilot[int]) -> None:
        await pilot.press("f4")
        screen: Any = pilot.app.screen
        await until(pilot, lambda: screen.query("#entries") and screen.entries.option_count)
        shown = "\n".join(str(option.prompt) for option in screen.entries.options)
        assert "Temperature" in shown
        assert not {"Context", "Threads", "KV", "fits"} & set(shown.replace(",", " ").split())
        assert app_of(pilot).session.status.info is not None

    play(Stage(tmp_path, about=remote), what)
