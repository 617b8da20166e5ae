"""Presets: what the settings file says, how a prompt names one, and what a template makes of a text."""

from pathlib import Path

import pytest

from localchat.config.presets import Preset, addressed, read_presets
from localchat.config.settings_file import read_settings, remove_preset, write_preset
from localchat.errors import UsageError

SUM = Preset("sum", {"temperature": 0.2}, "Sum up: {input}!")


def test_the_settings_file_holds_presets_and_keeps_its_comments(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("# mine\n[defaults]\nseed = 1 # why\n")
    write_preset(
        path, "sum", {"temperature": "0.2", "context_length": "4k", "template": "T {input}"}
    )
    write_preset(path, "sum", {"system": "brief"})
    write_preset(path, "other", {"seed": 7})
    text = path.read_text()
    assert "# mine" in text
    assert "seed = 1 # why" in text
    found = read_settings(path).presets
    assert found["sum"].values == {"temperature": 0.2, "context_length": 4096, "system": "brief"}
    assert found["sum"].template == "T {input}"
    remove_preset(path, "sum")
    assert list(read_settings(path).presets) == ["other"]
    assert read_settings(path).defaults == {"seed": 1}


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"sum": {"temprature": 1}}, "did you mean temperature"),
        ({"sum": {"temperature": "hot"}}, "from 0 to 10"),
        ({"sum": {"template": 3}}, "must be text"),
        ({"a b": {}}, "cannot be the name"),
        ({"sum": "text"}, "not a section"),
        ("text", "not a section"),
    ],
)
def test_what_is_wrong_with_a_preset_is_named(section: object, told: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_presets(Path("settings.toml"), section)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("text", "preset", "rest"),
    [
        ("@sum a text", SUM, "a text"),
        ("@sum", SUM, ""),
        ("@sum\nlines", SUM, "lines"),
        ("@everyone hi", None, "@everyone hi"),
        ("mail me@sum.org", None, "mail me@sum.org"),
        ("@sum.py fails", None, "@sum.py fails"),
        ("@", None, "@"),
    ],
)
def test_a_text_names_a_preset_by_its_first_word(
    text: str, preset: Preset | None, rest: str
) -> None:
    assert addressed(text, {"sum": SUM}) == (preset, rest)
    assert addressed(text, {}) == (None, text)


def test_a_slip_of_a_presets_name_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean @sum"):
        addressed("@smu x", {"sum": SUM})


def test_a_slip_of_a_documents_name_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean @lease"):
        addressed("@laese x", {}, ("lease",))


@pytest.mark.parametrize("text", ["@nosuch what?", "@nosuch"])
def test_strict_rejects_every_unknown_name(text: str) -> None:
    with pytest.raises(UsageError, match="there is no preset and no document named @nosuch"):
        addressed(text, {}, strict=True)


@pytest.mark.parametrize("text", ["@property\ndef x(self): ...", "@pytest.fixture", "@ x", "a @b"])
def test_strict_leaves_other_texts_alone(text: str) -> None:
    assert addressed(text, {}, strict=True) == (None, text)


@pytest.mark.parametrize(
    ("template", "question"),
    [
        ("", "x {input}"),
        ("Sum up: {input}!", "Sum up: x {input}!"),
        ("Sum up:", "Sum up:\n\nx {input}"),
    ],
)
def test_a_template_takes_the_text_as_it_is(template: str, question: str) -> None:
    assert Preset("p", {}, template).question("x {input}") == question
