"""A load or a prompt that does not fit: the steps with their flags."""

from pathlib import Path

import pytest

from localchat.errors import ContextExceeded, DoesNotFit
from localchat.fit.hardware import Machine
from tests.support.cli_program import Item
from tests.support.gguf_files import Q4_0, Size, llama
from tests.support.terminal_screen import Call

GB = 10**9
SMALL = Machine("small", frozenset({"avx2"}), 4, 8 * GB, 6 * GB)
NO_ROOM: tuple[Item, ...] = (
    DoesNotFit("it needs 9 GB, and 6 GB are free.", needed_bytes=9 * GB, free_bytes=6 * GB),
)
TOO_LONG: tuple[Item, ...] = (ContextExceeded("too long", prompt_tokens=5000, context_tokens=4096),)
LONG = ("--ctx", "32768", "--kv-type", "f16")


@pytest.fixture
def eight_b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An 8B model in Q4_0, of nothing, on a machine with 6 GB free."""
    monkeypatch.setattr("localchat.fit.hardware.read_machine", lambda: SMALL)
    size = Size(32, 4096, 32, 8, 128, 14336, 1024, 131072, Q4_0)
    return llama(size).sparse(tmp_path / "8b.gguf")


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


def test_a_prompt_that_is_too_long_gets_the_steps(call: Call) -> None:
    code, out, err = call(TOO_LONG, "hi")
    assert (code, out) == (6, "")
    assert "1. shorten the input by 905 tokens or more" in err
    assert "--ctx 6144" in err


def test_other_failures_list_no_steps(call: Call) -> None:
    code, _, err = call((DoesNotFit("no card"),), "hi")
    assert code == 4
    assert "1. " not in err
