"""Places of pictures and recordings in a rendered conversation.

Each attachment is rendered as a marker that occurs nowhere in the conversation, like the seals of
sealed_text.py. So no text of a message can pass for a picture. The template sees the marker as a part of the
message's text, as in llama.cpp's server.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from localchat.backend_api.sealed_text import TextPart, unused_seal
from localchat.chat_format.parser import PlacedAttachment, Rendered
from localchat.engine.request import Attachment, Message, Messages
from localchat.errors import TemplateError


class MarkedMessages(NamedTuple):
    """A conversation with a marker in place of each attachment."""

    messages: Messages
    attachments: tuple[Attachment, ...] = ()
    seal: str = ""
    """Characters on both sides of the number in a marker."""

    def place(self, rendered: Rendered) -> Rendered:
        """Return a rendered prompt that is cut at its markers. Raises TemplateError if one is missing."""
        if not self.attachments:
            return rendered
        parts = rendered.parts or (TextPart(rendered.text, rendered.special),)
        pieces: list[TextPart] = []
        placed: list[PlacedAttachment] = []
        for part in parts:
            # The pattern's group makes every second piece the number of an attachment.
            for index, piece in enumerate(self._marker.split(part.text)):
                if index % 2:
                    attachment = self.attachments[int(piece)]
                    placed.append(PlacedAttachment(len(pieces), attachment))
                elif piece:
                    pieces.append(part._replace(text=piece))
        missing = set(self.attachments) - {item.attachment for item in placed}
        if missing:
            raise TemplateError(
                f"The model's chat template leaves out {len(missing)} of {len(self.attachments)} attachments.",
                hint="Attach them to a message of the user.",
                reason="input",
            )
        text = self._marker.sub(
            lambda match: f"[{self.attachments[int(match[1])].kind}]", rendered.text
        )
        return replace(rendered, text=text, parts=tuple(pieces), attachments=tuple(placed))

    @property
    def _marker(self) -> re.Pattern[str]:
        escaped = re.escape(json.dumps(self.seal)[1:-1])
        seal = f"(?:{re.escape(self.seal)}|{escaped})"
        return re.compile(rf"{seal}(\d+){seal}")


def mark_attachments(messages: Messages) -> MarkedMessages:
    """Replace the attachments of all messages by markers."""
    if not any(message.attachments for message in messages.messages):
        return MarkedMessages(messages)
    texts = [msgspec.structs.replace(message, attachments=()) for message in messages.messages]
    bare = msgspec.structs.replace(messages, messages=tuple(texts))
    # Templates may escape texts, so the escaped form is searched too.
    seal = unused_seal(f"{msgspec.json.encode(bare).decode()}\0{_contents(texts)}")
    attachments: list[Attachment] = []
    marked = [_marked(message, attachments, seal) for message in messages.messages]
    return MarkedMessages(
        msgspec.structs.replace(messages, messages=tuple(marked)), tuple(attachments), seal
    )


def _contents(messages: Sequence[Message]) -> str:
    return "\0".join(message.content + message.reasoning for message in messages)


def _marked(message: Message, attachments: list[Attachment], seal: str) -> Message:
    """Return a message with markers in its content. Appends its attachments to `attachments`."""
    content = message.content
    pieces: list[str] = []
    start = 0
    for attachment in sorted(message.attachments, key=lambda attachment: attachment.position):
        position = min(max(attachment.position, start), len(content))
        pieces += [content[start:position], f"{seal}{len(attachments)}{seal}"]
        attachments.append(attachment)
        start = position
    return msgspec.structs.replace(
        message, content="".join((*pieces, content[start:])), attachments=()
    )
