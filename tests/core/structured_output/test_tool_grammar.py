"""Bound calls where a family's tags are control tokens: they stand in the grammar by number, and what is bound
is what the parser reads."""

import re
from typing import Any

import pytest
from llguidance import LLMatcher

from localchat.chat_format import ChatFormat
from localchat.core.structured_output.compiler import llguidance_tokenizer
from localchat.core.structured_output.tool_grammar import answer_grammar
from localchat.engine.request import GenerateRequest, Grammar, Message, Messages
from tests.support.answer_grammars import ONE, SCHEMA, SIGNS
from tests.support.chat_templates import chat_format
from tests.support.scripted_backend import VOCAB, ScriptedTokenizer
from tests.support.tool_calls import BOTH, FORMS, TOOLS, gather

_CONTROL = re.compile(r"<\|[^|>]*\|>|<｜[^｜>]*｜>|<\|[a-z_]*>|<[a-z_]*\|>")


class Controls(ScriptedTokenizer):
    """Bytes, and a token for each control tag of a family."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        found = sorted({tag for text in texts for tag in _CONTROL.findall(text)})
        self.tags = {tag: VOCAB + place for place, tag in enumerate(found)}
        self.vocab_size = VOCAB + len(found)
        self._split = re.compile("|".join(map(re.escape, found)) or "$^")

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        if not special:
            return super().encode(text)
        tokens, at = [], 0
        for tag in self._split.finditer(text):
            tokens += [*super().encode(text[at : tag.start()]), self.tags[tag.group()]]
            at = tag.end()
        return [*tokens, *super().encode(text[at:])]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token < VOCAB:
            return super().piece(token, special=special)
        tag = next(tag for tag, number in self.tags.items() if number == token)
        return tag.encode() if special else b""


HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}functions.{{ tools[0].function.name }}<|channel|>commentary{% endif %}"
    "{% if false %}<|channel|>analysis{% endif %}<|start|>assistant"
)
CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{}"
THOUGHT = "<|channel|>analysis<|message|>Shall <I>?<|end|><|start|>assistant"


def bound(
    chat: ChatFormat,
    text: str,
    grammar: Grammar | None = None,
    *,
    plain: bool = False,
    **fields: Any,
) -> bool:
    """Whether a whole answer may be `text`. `plain`: its tags spelled as letters."""
    tokenizer = Controls((*chat.tool_call_family.markup, *chat.reasoning_family.markup))
    prompt = Messages((Message("user", "hi"),), **fields)
    source = answer_grammar(
        GenerateRequest(prompt, grammar=grammar), chat.render(prompt), chat, tokenizer
    )
    assert source is not None
    matcher = LLMatcher(llguidance_tokenizer(tokenizer), source.source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.encode(text, special=not plain)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


STYLES = [style for style in SIGNS if _CONTROL.search(ONE[style])]


@pytest.mark.parametrize("style", STYLES)
def test_tags_are_tokens_and_never_letters(style: str) -> None:
    chat = chat_format(
        f"{{% if tools %}}{{{{ {SIGNS[style]!r} }}}}{{% endif %}}{{{{ messages[0].content }}}}"
    )
    assert bound(chat, ONE[style], tools=TOOLS, tool_choice="required")
    assert not bound(chat, ONE[style], tools=TOOLS, tool_choice="required", plain=True)
    parser = chat.answer_parser(chat.render(Messages((Message("user", "hi"),), tools=TOOLS)))
    calls = gather([*parser.feed(FORMS[style]), *parser.finish()])[1]
    assert calls == BOTH


@pytest.mark.parametrize(
    ("said", "fits"),
    [
        (CALL, True),
        (THOUGHT + CALL, True),
        (CALL.replace("get_weather", "get_time"), False),
        ("<|channel|>final<|message|>Hello.", False),
        (THOUGHT + "<|channel|>final<|message|>Hello.", False),
    ],
)
def test_gpt_oss_calls_the_tool_that_was_named(said: str, fits: bool) -> None:
    assert bound(chat_format(HARMONY), said, tools=TOOLS, tool_choice="get_weather") is fits


@pytest.mark.parametrize(
    ("said", "fits"),
    [
        ("<|channel|>final<|message|>Hello {you}.", True),
        (THOUGHT + "<|channel|>final<|message|>Hello.", True),
        (THOUGHT + CALL, True),
        ("<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant" + CALL, True),
        (THOUGHT + CALL.replace("{}", '{"nights": 3}'), False),
    ],
)
def test_gpt_oss_may_write_text_with_strict_tools(said: str, fits: bool) -> None:
    strict = ({**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1])
    assert bound(chat_format(HARMONY), said, tools=strict) is fits


def test_gpt_oss_reasons_before_a_constrained_answer() -> None:
    chat = chat_format(HARMONY)
    assert bound(chat, THOUGHT + '<|channel|>final<|message|>{"a": 1}', SCHEMA)
    assert bound(chat, '<|channel|>final<|message|>{"a": 1}', SCHEMA)
    assert not bound(chat, THOUGHT + "<|channel|>final<|message|>Hello", SCHEMA)
