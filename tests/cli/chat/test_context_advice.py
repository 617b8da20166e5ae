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
    assert first == "1. shorten the input by 905 tokens or more"
    assert last.startswith(
        "2. another model: one with a longer context, because this model was trained"
    )


def test_a_prompt_beyond_what_the_model_knows_gets_none_either() -> None:
    lines = advised(9000, 4096, context_train=8192)
    assert [line[0] for line in lines] == ["1", "2"]
    assert not any("--ctx" in line or "--kv-type" in line for line in lines)


@pytest.mark.parametrize("kv_type", ["f16", "q4_0"])
def test_a_context_that_can_grow_says_how_and_keeps_its_kv_type(kv_type: str) -> None:
    lines = advised(5000, 4096, context_train=32768, kv_type=kv_type)
    assert "".join(line[0] for line in lines) == "123"
    assert any("--ctx 6144" in line for line in lines)
    assert not any("--kv-type" in line for line in lines)


def test_a_server_elsewhere_decides_for_itself() -> None:
    lines = advised(5000, 4096, backend="remote", context_train=0)
    assert [line[0] for line in lines] == ["1", "2"]
