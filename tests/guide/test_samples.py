"""The questions that the first screen offers get the right answer from the guide."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from localchat.session.context import ModelSetup
from localchat.tui.widgets.welcome import greeting
from tests.support.tui_stage import Stage

pytestmark = pytest.mark.usefixtures("one_thread")

NAMED = {
    "What can localchat do?": ("models", "terminal"),
    "Which model should I choose?": ("GB", "localchat"),
    "How do I ask about a file?": ("-f", "`@`"),
}


def test_every_sample_is_tried_here(tmp_path: Path) -> None:
    setup: ModelSetup = Stage(tmp_path, models=("guide",)).resolve(None, {})
    assert set(greeting(setup).samples) == set(NAMED)


@pytest.mark.parametrize("question", NAMED)
def test_a_sample_is_answered(question: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "localchat", "-m", "guide", "--no-history", "-q", question],
        env={
            **os.environ,
            "LOCALCHAT_DATA_DIR": str(tmp_path),
            "LOCALCHAT_CONFIG": str(tmp_path / "s"),
        },
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    for word in NAMED[question]:
        assert word in done.stdout
