"""A load or a prompt that does not fit: the steps in a pipe, and the one that is picked on a terminal."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from localchat.cli.context import AppContext
from localchat.engine.options import EngineOptions
from localchat.errors import ContextExceeded, DoesNotFit
from localchat.fit.hardware import Machine
from tests.support.cli_program import INFO, SCENARIOS, Item, ScenarioEngine, ScriptedApp
from tests.support.gguf_files import Q4_0, Size, llama
from tests.support.terminal_screen import Call

GB = 10**9
SMALL = Machine("small", frozenset({"avx2"}), 4, 8 * GB, 6 * GB)
NO_ROOM: tuple[Item, ...] = (
    DoesNotFit("it needs 9 GB, and 6 GB are free.", needed_bytes=9 * GB, free_bytes=6 * GB),
)
TOO_LONG: tuple[Item, ...] = (ContextExceeded("too long", prompt_tokens=5000, context_tokens=4096),)
LONG = ("--ctx", "32768", "--kv-type", "f16")


class Retrying(ScriptedApp):
    """Plays one script after the other, an engine each."""

    def __init__(self, *scripts: Sequence[Item]) -> None:
        super().__init__(scripts[0])
        self._left = list(scripts)
        self.app = AppContext(open_engine=self._next)

    def _next(self, options: EngineOptions, say: Callable[[str], None]) -> ScenarioEngine:
        self.options.append(options)
        self.engines.append(ScenarioEngine(items=self._left.pop(0), about=INFO))
        return self.engines[-1]


@pytest.fixture
def eight_b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An 8B model in Q4_0, of nothing, on a machine with 6 GB free."""
    monkeypatch.setattr("localchat.fit.hardware.read_machine", lambda: SMALL)
    size = Size(32, 4096, 32, 8, 128, 14336, 1024, 131072, Q4_0)
    return llama(size).sparse(tmp_path / "8b.gguf")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the user types at the question, on a terminal."""
    typed: list[str] = []
    monkeypatch.setattr("localchat.cli.chat.memory_choice.can_ask", lambda: True)
    monkeypatch.setattr("click.prompt", lambda *_, **__: typed.pop(0))
    return typed


def test_a_pipe_gets_the_steps_with_their_flags_and_the_exit_code(
    call: Call, eight_b: Path
) -> None:
    code, out, err = call(NO_ROOM, "-m", eight_b, *LONG, "hi", named=False)
    assert (code, out) == (4, "")
    assert "  1. KV type: KV cache in q8_0" in err
    assert "--kv-type q8_0" in err
    assert "  2. context: 11,008 tokens rather than 32,768" in err
    assert "no help" not in err
    assert "chunked prefill" not in err


def test_the_step_that_is_picked_goes_on_with_its_setting(
    call: Call, eight_b: Path, answers: list[str]
) -> None:
    answers += ["9", "2"]
    app = Retrying(NO_ROOM, SCENARIOS["hello"])
    code, out, err = call(app, "-m", eight_b, *LONG, "hi", named=False)
    assert (code, out) == (0, "Hello.\n")
    assert "9 is not one of these numbers" in err
    first, second = (options.load for options in app.options)
    assert (first.context_tokens, second.context_tokens) == (32768, 11008)
    assert second.kv_type == "f16"


def test_steps_that_are_not_enough_alone_add_up(
    call: Call, eight_b: Path, answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tight = replace(SMALL, ram_total_bytes=6 * GB, ram_free_bytes=int(4.5 * GB))
    monkeypatch.setattr("localchat.fit.hardware.read_machine", lambda: tight)
    answers += ["1", "1"]
    app = Retrying(NO_ROOM, NO_ROOM, SCENARIOS["hello"])
    call(app, "-m", eight_b, *LONG, "hi", named=False)
    last = app.options[-1].load
    assert last.kv_type == "q8_0"
    assert last.context_tokens is not None and last.context_tokens < 32768


def test_no_pick_ends_as_in_a_pipe(call: Call, eight_b: Path, answers: list[str]) -> None:
    answers.append("")
    assert call(NO_ROOM, "-m", eight_b, *LONG, "hi", named=False).code == 4


def test_a_prompt_that_is_too_long_is_sent_again_with_the_step(
    call: Call, answers: list[str]
) -> None:
    answers.append("3")
    app = Retrying(TOO_LONG, SCENARIOS["hello"])
    code, out, err = call(app, "hi")
    assert (code, out) == (0, "Hello.\n")
    assert "1. shorter input: shorten the input by 905 tokens or more" in err
    assert app.options[1].load.context_tokens == 6144
    assert [m.content for m in app.engines[1].requests[0].prompt.messages] == ["hi"]  # type: ignore[union-attr]


def test_other_failures_ask_nothing(call: Call, answers: list[str]) -> None:
    assert call((DoesNotFit("no card"),), "hi").code == 4
