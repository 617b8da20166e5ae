"""The collector rests while the program starts, and works from then on."""

import subprocess
import sys

import pytest


def said(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    return done.stdout.split()


def test_what_was_there_at_waking_is_left_alone_and_the_rest_is_collected() -> None:
    code = (
        "import gc\nfrom localchat import gc_control\n"
        "gc_control.pause_gc(); print(gc.isenabled())\n"
        "gc_control.resume_gc(); frozen = gc.get_freeze_count(); print(gc.isenabled(), frozen > 1000)\n"
        "gc_control.resume_gc(); print(gc.get_freeze_count() == frozen)\n"
    )
    assert said(code) == ["False", "True", "True", "True"]


def test_waking_without_a_rest_changes_nothing() -> None:
    code = (
        "import gc\nfrom localchat import gc_control\n"
        "gc_control.resume_gc(); print(gc.isenabled(), gc.get_freeze_count())"
    )
    assert said(code) == ["True", "0"]


@pytest.mark.parametrize("words", [["list"], ["--no-attach", "hello there"]])
def test_the_collector_works_once_a_command_does(words: list[str]) -> None:
    code = (
        "import gc, sys\nimport localchat.cli as cli, localchat.cli.chat.one_shot as one_shot\n"
        "import localchat.cli.models.list as listing\n"
        "def at_work(*words, **more): print(gc.isenabled(), file=sys.stderr); raise KeyboardInterrupt\n"
        "one_shot.OneShot.run = at_work\nlisting.command.callback = at_work\n"
        f"cli.main({words!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stderr.splitlines()[-1:] == ["True"], done.stderr
