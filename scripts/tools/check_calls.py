"""Checks which tool calls and reasoning the parser reads back, for every chat template of a folder.

    python -m scripts.tools.check_calls FOLDER

Each template renders a conversation with two calls (nested values, quotes, letters beyond ASCII) and
with reasoning. What it renders for the assistant is what its model was trained to write, and goes to
the answer parser letter by letter. The table says `all`, `first` (the template writes one call only),
`none shown` (it writes no calls of earlier turns) or what was read instead. The last line is JSON. Ends
with 1 if a call or reasoning that a template shows is not read.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from localchat.chat_format.parser import Call, Part, Rendered, Thought
from localchat.chat_format.render_process import RenderProcess
from localchat.chat_format.template_format import TemplateFormat
from localchat.engine.request import CalledTool, Message, Messages
from localchat.errors import TemplateError

_VALUES: dict[str, Any] = {
    "town": 'Köln "am" Rhein',
    "days": 3,
    "where": {"a": [1, {"b": "x"}]},
    "tags": ["u", "v"],
    "sure": True,
}
_KINDS = {
    "town": "string",
    "days": "integer",
    "where": "object",
    "tags": "array",
    "sure": "boolean",
}
_FINE = ("read", "none shown", "closed")
_THOUGHT = "PONDERING"
_MARK = "MARKED RESULT"


def _tool(name: str, kinds: dict[str, str]) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": key} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties}
    return {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": parameters},
    }


_TOOLS = (_tool("get_weather", _KINDS), _tool("get_time", {"zone": "string"}))
_CALLS = (
    CalledTool("get_weather", json.dumps(_VALUES, ensure_ascii=False), id="call00001"),
    CalledTool("get_time", '{"zone": "CET"}', id="call00002"),
)
_WANTED = [("get_weather", _VALUES), ("get_time", {"zone": "CET"})]


class Found(NamedTuple):
    """One line of the table."""

    name: str
    style: str
    family: str
    calls: str
    reasoning: str

    @property
    def good(self) -> bool:
        known = ("all", "first", "none shown", "no tools", "refused")
        return self.calls.startswith(known) and self.reasoning in _FINE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    process = RenderProcess()
    found = [_checked(path, process) for path in sorted(folder.glob("*.jinja"))]
    for one in found:
        print(f"{one.name:48} {one.style:16} {one.family:9} {one.calls:24} {one.reasoning}")
    bad = [one.name for one in found if not one.good]
    print(json.dumps({"templates": len(found), "bad": bad}))
    return 1 if bad else 0


def _checked(path: Path, process: RenderProcess) -> Found:
    chat = TemplateFormat(
        {"default": path.read_text("utf-8")},
        {"bos_token": "<s>", "eos_token": ""},
        process=process,
    )
    name = path.stem
    try:
        rendered, said = _answer(chat, "")
    except TemplateError as problem:
        return Found(name, "-", "-", f"refused ({problem.details.get('reason', '')})", "none shown")
    calls = _read(chat, rendered, said)
    verdict = _judged(calls, said)
    if not any("get_weather" in text for text in (rendered.text, said)):
        verdict = "no tools"
    return Found(
        name, chat.tool_call_family.name, chat.reasoning_family.name, verdict, _reasoning(chat)
    )


def _answer(chat: TemplateFormat, reasoning: str) -> tuple[Rendered, str]:
    """The prompt, and the text that the template appends for an answer with calls. Raises TemplateError."""
    options = {"enable_thinking": True} if reasoning else {}
    user = Message("user", "Hello")
    rendered = chat.render(Messages((user,), tools=_TOOLS, template_options=options))
    called = Message("assistant", tool_calls=_CALLS, reasoning=reasoning)
    results = [Message("tool", _MARK, tool_call_id=call.id, name=call.name) for call in _CALLS]
    said = (user, called, *results)
    whole = chat.render(Messages(said, tools=_TOOLS, template_options=options)).text
    shared = next(
        (
            at
            for at, (one, other) in enumerate(zip(rendered.text, whole, strict=False))
            if one != other
        ),
        min(len(rendered.text), len(whole)),
    )
    if shared < len(rendered.text):  # in the middle of a tag
        shared = max(whole.rfind("<", max(0, shared - 40), shared), whole.rfind(">", 0, shared) + 1)
    return rendered, whole[shared:].partition(_MARK)[0]


def _read(chat: TemplateFormat, rendered: Rendered, said: str) -> list[tuple[str, Any]]:
    parser = chat.answer_parser(rendered)
    parts: list[Part] = [part for letter in said for part in parser.feed(letter)]
    whole: dict[int, tuple[str, str]] = {}
    for part in [*parts, *parser.finish()]:
        if isinstance(part, Call):
            name, arguments = whole.get(part.number, ("", ""))
            whole[part.number] = (name + part.name, arguments + part.arguments)
    return [(name, _value(arguments)) for name, arguments in whole.values()]


def _value(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _judged(calls: list[tuple[str, Any]], said: str) -> str:
    if calls == _WANTED:
        return "all"
    if "get_weather" not in said:
        return "none shown"
    if calls == _WANTED[:1] and "CET" not in said:
        return "first"
    return f"read: {calls}"


def _reasoning(chat: TemplateFormat) -> str:
    try:
        rendered, said = _answer(chat, _THOUGHT)
    except TemplateError:
        return "none shown"
    if _THOUGHT not in said:
        return "none shown"
    if rendered.text.rstrip().endswith(chat.reasoning_family.closes):
        return "closed"  # the prompt itself: it has another switch
    parser = chat.answer_parser(rendered)
    parts = [*parser.feed(said), *parser.finish()]
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    return "read" if thought.strip() == _THOUGHT else f"read: {thought!r}"


if __name__ == "__main__":
    sys.exit(main())
