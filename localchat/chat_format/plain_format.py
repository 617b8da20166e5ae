"""Format of a model without a chat template: labeled plain text, and a warning.

It uses no markup of other model families, because a model that never saw such markup answers with noise. Plain
labels work to some degree with every model, including base models.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from localchat.chat_format.attachments import mark_attachments
from localchat.chat_format.base import ChatFormat
from localchat.chat_format.parser import Answer, ChoiceParser, Part, Rendered
from localchat.chat_format.reasoning_parser import THINK
from localchat.chat_format.tool_calls.families import UNKNOWN
from localchat.engine.request import Message, Messages

_LABELS = {"user": "User", "assistant": "Assistant", "system": "System", "tool": "Tool"}
_ANSWER = "Assistant:"
"""Label of the answer. The model generates the space after it."""
_STOP = tuple(f"\n{label}:" for label in _LABELS.values())
"""Start of another turn. Base models also go on with another answer."""

NO_TEMPLATE = (
    "This model has no chat template, so the conversation is sent as plain text "
    "(“User: …”, “Assistant: …”). It may be a base model: --raw-prompt continues a text, and an instruct "
    "version of the model answers questions."
)
NO_TOOLS = "This model has no chat template, so it does not see the tools."


class PlainFormat(ChatFormat):
    """Renders each message as a labeled paragraph."""

    markup = ()
    tool_call_family = UNKNOWN
    reasoning_family = THINK
    warning = NO_TEMPLATE

    def render(self, messages: Messages) -> Rendered:
        """Return the prompt. A leading system message has no label, because base models expect text."""
        marked = mark_attachments(messages)
        conversation = marked.messages.messages
        blocks = [
            _block(message, is_first=index == 0) for index, message in enumerate(conversation)
        ]
        ends_with_answer = bool(conversation) and conversation[-1].role == "assistant"
        if not (messages.continue_last and ends_with_answer):
            blocks.append(_ANSWER)
        tools: tuple[dict[str, Any], ...] = ()
        warnings = [NO_TEMPLATE]
        if messages.tools and messages.tool_choice != "none":
            tools = messages.tools
            warnings.append(NO_TOOLS)
        return marked.place(
            Rendered(
                text="\n\n".join(blocks),
                special=False,
                add_bos=True,
                stop=_STOP,
                warnings=tuple(warnings),
                tools=tools,
            )
        )

    def answer_parser(self, rendered: Rendered) -> ChoiceParser:
        """Return a parser that finds a `<think>` block at the start, and tool calls.

        A grammar may force the answer to be a call.
        """
        parser = super().answer_parser(rendered)
        if rendered.text.endswith(_ANSWER):
            return _TrimmedParser(parser)
        return parser


class _TrimmedParser:
    """Drops the white space between the label and the answer."""

    def __init__(self, parser: ChoiceParser) -> None:
        self._parser = parser
        self._started = False

    @property
    def thinking(self) -> bool:
        return self._parser.thinking

    def passes(self, text: str) -> bool:
        return self._started and self._parser.passes(text)

    def feed(self, text: str) -> list[Part]:
        return list(self._trimmed(self._parser.feed(text)))

    def finish(self) -> list[Part]:
        return list(self._trimmed(self._parser.finish()))

    def _trimmed(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            if self._started or not isinstance(part, Answer):
                yield part
            elif text := part.text.lstrip():
                self._started = True
                yield Answer(text)


def _block(message: Message, *, is_first: bool) -> str:
    if is_first and message.role == "system":
        return message.content
    label = _LABELS.get(message.role, message.role.capitalize())
    return f"{label}: {message.content}".rstrip(" ")
