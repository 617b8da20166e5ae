"""Advice for a prompt longer than the context: only what can help this model."""

import msgspec
import pytest

from localchat.cli.chat.memory_advice import with_prompt_steps
from localchat.engine.interface import EngineInfo
from localchat.errors import ContextExceeded
from tests.support.scripted_engine import ScriptedEngine


class Told(ScriptedEngine):
    """An engine with an info of its own."""

    changes: dict[str, object]

    def info(self) -> EngineInfo:
        return msgspec.structs.replace(super().info(), **self.changes)


def advised(prompt: int, context: int, **changes: object) -> list[str]:
    engine = Told(context_tokens=context)
    engine.changes = {"backend": "llamacpp", "kv_type": "f16", "context_tokens": context, **changes}
    problem = ContextExceeded("too long", prompt_tokens=prompt, context_tokens=context)
    return with_prompt_steps(problem, engine).hint.splitlines()


def test_a_model_at_its_full_context_gets_no_advice_to_grow_it() -> None:
    first, last = advised(5000, 4096, context_train=4096)
    assert first.startswith("1. shorter input: shorten the input by 905 tokens or more; adds room")
    assert last.startswith("2. smaller model: another model, because this model was trained for 4,")


def test_a_prompt_beyond_what_the_model_knows_gets_none_either() -> None:
    lines = advised(9000, 4096, context_train=8192)
    assert [line[0] for line in lines] == ["1", "2"]
    assert not any("--ctx" in line or "--kv-type" in line for line in lines)


@pytest.mark.parametrize(("kv_type", "smaller"), [("f16", "q8_0"), ("q4_0", "")])
def test_a_context_that_can_grow_says_how(kv_type: str, smaller: str) -> None:
    lines = advised(5000, 4096, context_train=32768, kv_type=kv_type)
    assert "".join(line[0] for line in lines) == ("1234" if smaller else "123")
    assert any("--ctx 6144" in line for line in lines)
    assert any(f"--kv-type {smaller}" in line for line in lines) is bool(smaller)


def test_a_server_elsewhere_decides_for_itself() -> None:
    lines = advised(5000, 4096, backend="remote", context_train=0)
    assert [line[0] for line in lines] == ["1", "2"]
