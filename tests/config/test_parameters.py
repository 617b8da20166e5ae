"""Table of settings: its texts agree with the types and defaults of `Settings`."""

import click
import msgspec
import pytest

from localchat.cli.options import engine_options, given_flags, load_flags
from localchat.config.parameters import PARAMETERS
from localchat.config.settings import Given, Settings, convert

SWITCHES = [key for key, parameter in PARAMETERS.items() if parameter.is_switch and key != "think"]


@pytest.mark.parametrize("key", SWITCHES)
def test_the_default_of_a_switch_is_that_of_its_field(key: str) -> None:
    default = getattr(Settings(), key)
    assert PARAMETERS[key].default == ("on" if default else "off")


@pytest.mark.parametrize("key", ["cache_disk_gb", "threads", "n", "keep_alive"])
def test_the_default_of_a_number_is_that_of_its_field(key: str) -> None:
    assert convert(key, Given(PARAMETERS[key].default, key)) == getattr(Settings(), key)


def test_the_flag_of_a_message_changes_the_default() -> None:
    flags = {key: parameter.flag for key, parameter in PARAMETERS.items()}
    assert flags["speculation"] == "--no-speculation"
    assert flags["require_gpu"] == "--require-gpu"
    assert flags["stats"] == "--stats"
    assert flags["typical_p"] == "-o typical_p"
    assert flags["temperature"] == "--temperature"


def test_help_ends_with_the_default() -> None:
    assert PARAMETERS["threads"].flag_help == (
        "Compute threads: a whole number; 0 is every physical core. Default: 0."
    )
    assert PARAMETERS["offline"].flag_help == "Never use the network. Default: off."


def test_a_row_makes_an_option_for_prompts_and_loads() -> None:
    @engine_options(with_model=True)
    def prompt() -> None: ...

    @load_flags
    def load() -> None: ...

    prompt_keys = {option.name for option in click.command()(prompt).params}
    load_keys = {option.name for option in click.command()(load).params}
    rows = PARAMETERS.items()
    assert prompt_keys >= {key for key, parameter in rows if parameter.has_option}
    assert load_keys == {key for key, parameter in rows if parameter.loads}


@pytest.mark.parametrize(
    ("args", "value"),
    [
        ("--no-cache-disk", "0"),
        ("--cache-disk 4 --no-cache-disk", "0"),
        ("--no-cache-disk --cache-disk 4", "4"),
    ],
)
def test_the_last_flag_of_the_disk_cache_wins(args: str, value: str) -> None:
    @click.command()
    @load_flags
    @click.pass_context
    def load(ctx: click.Context, /, **_: object) -> object:
        return given_flags(ctx)["cache_disk_gb"].value

    assert load.main(args.split(), standalone_mode=False) == value


def test_every_field_is_a_row() -> None:
    assert set(PARAMETERS) == {field.name for field in msgspec.structs.fields(Settings)}
