"""Text for the clipboard of the person at the terminal, also over ssh and inside tmux.

Nobody answers, so success cannot be known: say "sent to the terminal".
"""

import base64
import os
import subprocess
from collections.abc import Callable, Mapping
from typing import Final

_TMUX: Final = ("tmux", "load-buffer", "-w", "-")
_DEADLINE_S: Final = 2.0


def osc_52(text: str) -> str:
    """The escape sequence that asks a terminal to take `text` into its clipboard."""
    encoded = base64.b64encode(text.encode("utf-8", "replace")).decode("ascii")
    return f"\x1b]52;c;{encoded}\x1b\\"


def send(
    text: str, write: Callable[[str], None], environment: Mapping[str, str] | None = None
) -> None:
    """Hand `text` to tmux where it runs (its default drops OSC 52 of programs; its own buffer reaches the
    outer terminal), else to the terminal through `write`. Blocks for 2 s at most."""
    environment = os.environ if environment is None else environment
    if environment.get("TMUX") and _to_tmux(text):
        return
    write(osc_52(text))


def _to_tmux(text: str) -> bool:
    try:
        done = subprocess.run(
            _TMUX,
            input=text.encode("utf-8", "replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
