"""The command with a scripted engine in place of every model: `python -m tests.support.server_program serve
…`."""

import sys
from collections.abc import Callable

from localchat.cli import main
from localchat.cli.context import AppContext
from localchat.engine.options import EngineOptions
from tests.support.scripted_engine import ScriptedEngine


def _scripted(options: EngineOptions, say: Callable[[str], None]) -> ScriptedEngine:
    return ScriptedEngine(model=options.name)


if __name__ == "__main__":
    main(sys.argv[1:], AppContext(open_engine=_scripted))
