"""Gaps are put in the model's own tokens, or refused."""

import pytest

from localchat.core.input_processor import InputProcessor
from localchat.engine.request import GenerateRequest, Infill
from localchat.errors import ContextExceeded, UsageError
from tests.support.engine_core_bench import _Model
from tests.support.scripted_backend import BOS, ScriptedTokenizer

MARKS = {"fim_pre": 1, "fim_suf": 2, "fim_mid": 3, "fim_sep": 4, "fim_rep": 5}


class Coder(ScriptedTokenizer):
    """Bytes, and marks at control characters."""

    def __init__(self, *without: str, add_bos: bool = False) -> None:
        self.marks = {name: mark for name, mark in MARKS.items() if name not in without}
        self.add_bos = add_bos

    def special(self, name: str) -> int:
        return self.marks.get(name, -1)


def prompt(vocabulary: ScriptedTokenizer, infill: Infill) -> list[int]:
    input_processor = InputProcessor(_Model(vocabulary), 400, {}, lambda text: None)
    request_state, accepted = input_processor.accept(1, GenerateRequest(prompt=infill))
    assert accepted.prompt_tokens == len(request_state.tokens)
    return list(request_state.tokens)


def text(tokens: list[int]) -> str:
    return "".join(
        {1: "<P>", 2: "<S>", 3: "<M>", 4: "<F>", 5: "<R>"}.get(t, chr(t)) for t in tokens
    )


def test_gap_alone_is_prefix_suffix_middle() -> None:
    assert text(prompt(Coder(), Infill("def f(", "return 1"))) == "<P>def f(<S>return 1<M>"
    assert prompt(Coder(add_bos=True), Infill("a", ""))[0] == BOS
    assert text(prompt(Coder(), Infill("", ""))) == "<P><S><M>"


def test_other_files_come_first_in_the_format_of_the_model() -> None:
    infill = Infill("x = ", "\n", extra=(("a.py", "A = 1"), ("b.py", "B = 2\n")))
    whole = text(prompt(Coder(), infill))
    assert whole == "<R>repository\n<F>a.py\nA = 1\n<F>b.py\nB = 2\n<F>file\n<P>x = <S>\n<M>"
    assert text(prompt(Coder("fim_rep"), infill)).startswith("<F>a.py\n")
    plain = text(prompt(Coder("fim_rep", "fim_sep"), infill))
    assert plain == "a.py\nA = 1\nb.py\nB = 2\n<P>x = <S>\n<M>"


def test_model_without_the_tokens_refuses_and_names_what_is_missing() -> None:
    with pytest.raises(UsageError, match="fim_pre, fim_suf, fim_mid"):
        prompt(ScriptedTokenizer(), Infill("a", "b"))
    with pytest.raises(UsageError, match=r"\(fim_suf\)"):
        prompt(Coder("fim_suf"), Infill("a", "b"))


def test_context_files_that_do_not_fit_are_refused_not_truncated() -> None:
    with pytest.raises(ContextExceeded):
        prompt(Coder(), Infill("a" * 300, "b" * 300))
