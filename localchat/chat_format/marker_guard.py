"""Separates the text of messages from the control tokens of a chat template.

A template joins its markup and the text of messages, so a pasted `<|im_end|>` would look like the end of a
turn. Messages are therefore sealed before they are rendered (sealed_text.py). Templates may trim, cut, join
or escape them, and a sealed marker still never equals a real one.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from localchat.backend_api.sealed_text import PromptSplitter, Sealer, TextPart, unused_seal
from localchat.backend_api.special_tokens import SpecialToken
from localchat.engine.request import CalledTool, Message, Messages

_FRAMED = re.compile(r"<[|\uff5c][^\s<>]+[|\uff5c]>")
"""User-defined tokens that do not occur in text by accident."""
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Roles that templates may frame as markers, as in `<|user|>`."""
_JSON_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')
_TAG = re.compile(r"[<\[][^\s<>\[\]]+[>\]]")


class MarkerGuard:
    """Seals markers in messages, and splits the rendered prompt at the sealed markers."""

    def __init__(
        self,
        tokens: Sequence[SpecialToken],
        *,
        source: str = "",
        rendered: str = "",
        reasoning: Sequence[str] = (),
    ) -> None:
        """tokens: special tokens of the vocabulary. source: the chat template.

        rendered: plain conversations that the template rendered. Their user-defined tokens are markers too.
        reasoning: tags of the model's reasoning, which are plain text in assistant messages if the template
        searches for them there.
        """
        control = {token.text for token in tokens if token.control and token.text.strip()}
        user_defined = {token.text for token in tokens if not token.control}
        turns = {
            text
            for text in user_defined
            if _FRAMED.fullmatch(text) or (_TAG.fullmatch(text) and text in rendered)
        }.difference(reasoning)
        searched = {tag for tag in reasoning if f"'{tag}'" in source or f'"{tag}"' in source}
        tags = {text for text in user_defined if _TAG.fullmatch(text) and text in source}
        self._splitter = PromptSplitter(tokens, turns | tags)
        self._usual = Sealer(control | turns)
        self._of_names = Sealer(control | turns, framed=True)
        self._of_assistant = Sealer((control | turns) - searched)
        self._of_tool = Sealer(control | turns | tags)

    def seal(self, messages: Messages) -> tuple[Messages, str]:
        """Return the messages with sealed markers, and the seal. Without markers, the seal is empty."""
        texts: list[tuple[Sealer, str]] = []

        def note(sealer: Sealer, text: str) -> str:
            texts.append((sealer, text))
            return text

        self._changed(messages, note)
        if not any(sealer.affects(text) for sealer, text in texts):
            return messages, ""
        seal = unused_seal("\0".join(text for _, text in texts))
        return self._changed(messages, lambda sealer, text: sealer.seal(text, seal)), seal

    def split(self, rendered: str, seal: str) -> tuple[str, tuple[TextPart, ...]]:
        """Return a rendered prompt without seals, and its parts. A trusted prompt has no parts."""
        return self._splitter.split(rendered, seal)

    def clean(self, text: str, seal: str) -> str:
        """Return a text, such as a template's error message, without the seal."""
        return text.replace(seal, "") if seal else text

    def _changed(self, messages: Messages, change: Callable[[Sealer, str], str]) -> Messages:
        """Return the messages with every text changed."""
        usual = partial(change, self._usual)
        name = partial(change, self._of_names)
        of_role = {"assistant": self._of_assistant, "tool": self._of_tool}

        def message_changed(message: Message) -> Message:
            return msgspec.structs.replace(
                message,
                role=message.role if message.role in _ROLES else name(message.role),
                content=change(of_role.get(message.role, self._usual), message.content),
                reasoning=usual(message.reasoning),
                tool_calls=tuple(
                    CalledTool(name(call.name), _json_mapped(call.arguments, name), name(call.id))
                    for call in message.tool_calls
                ),
                tool_call_id=name(message.tool_call_id),
                name=name(message.name),
            )

        return msgspec.structs.replace(
            messages,
            messages=tuple(map(message_changed, messages.messages)),
            tools=_mapped(messages.tools, usual),
            template_options=_mapped(messages.template_options, usual),
        )


def _json_mapped(text: str, change: Callable[[str], str]) -> str:
    """Change every text inside JSON, including keys. Text that is not JSON is changed as a whole."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return change(text)
    return _JSON_TEXT.sub(lambda match: f'"{change(match[1])}"', text)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401 - plain data
    """Return plain data with every text changed, including keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_mapped(item, change) for item in value)
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    return value
