"""Exports a conversation: Markdown for people, JSON with all metrics for programs.

JSON has the bytes of pictures and recordings in base64.
"""

import json
import re
from pathlib import Path
from typing import Any, Final

import msgspec

from localchat.chat import ID_DIGITS
from localchat.chat.conversation import Conversation, Node
from localchat.chat.prompt_messages import unsent_ids
from localchat.chat.titles import title_for
from localchat.engine.attachments import data_url, described_content
from localchat.engine.request import Attachment
from localchat.engine.stats_line import stats_line
from localchat.sanitize import fenced
from localchat.units import moment

_NAMES: Final = {"user": "User", "assistant": "Assistant", "system": "System", "tool": "Tool"}
_STATES: Final = {
    "open": "was not finished",
    "stopped": "was stopped",
    "length": "ended at the longest length",
    "failed": "failed",
}
_FORMAT: Final = 1
_MAX_NAME: Final = 60
_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def file_name(conversation: Conversation) -> str:
    """Return a new file name from the title, such as `why-is-the-sky-blue.md`."""
    words = re.findall(r"\w+", title_for(conversation).lower())
    stem = "-".join(words)[:_MAX_NAME].rstrip("-") or conversation.id[:ID_DIGITS]
    names = (f"{stem}.md", *(f"{stem}-{number}.md" for number in range(2, 1000)))
    return next((name for name in names if not Path(name).exists()), names[-1])


def as_markdown(conversation: Conversation, *, embed: bool = False) -> str:
    """Return the shown path as a Markdown document. `embed` puts pictures and recordings into it."""
    parts = [f"# {_one_line(title_for(conversation)) or 'Conversation'}"]
    about = moment(conversation.created_s)
    if conversation.model:
        about += f" · {_one_line(conversation.model)}"
    parts.append(about)
    if conversation.system:
        parts += ["## Instructions", conversation.system]
    unsent = unsent_ids(conversation)
    for node in conversation.path():
        parts += _markdown(node, not_sent=node.id in unsent, embed=embed)
    return _without_lone_surrogates("\n\n".join(part.rstrip("\n") for part in parts) + "\n")


def _markdown(node: Node, *, not_sent: bool, embed: bool) -> list[str]:
    message = node.message
    heading = f"## {_NAMES.get(message.role, message.role)}"
    if node.replaces:
        heading = f"## Summary of {len(node.replaces)} earlier messages"
    parts = [heading]
    if message.reasoning:
        quoted = "\n".join(f"> {line}".rstrip() for line in message.reasoning.splitlines())
        parts.append(f"> *Reasoning:*\n>\n{quoted}")
    if embed and message.attachments:
        parts += [message.content, *map(_embedded, message.attachments)]
    elif message.role == "tool":
        # A result is data: its Markdown must not become that of the document.
        parts.append(fenced(message.content))
    elif message.content or message.attachments:
        parts.append(described_content(message))
    for call in message.tool_calls:
        parts.append(f"*Calls the tool `{_one_line(call.name)}`:*")
        parts.append(fenced(call.arguments, "json"))
    notes = []
    if node.run is not None:
        notes.append(f"Tool `{message.name}`: {node.run.state} in {node.run.seconds:.1f} s.")
    if node.state in _STATES:
        notes.append(f"This answer {_STATES[node.state]}.")
    if node.error:
        notes.append(_one_line(node.error))
    if not_sent:
        notes.append("Not sent any more.")
    if node.metrics is not None:
        line = f"{node.metrics.model}, {node.metrics.backend}"
        if node.metrics.done is not None:
            line += f" · {stats_line(node.metrics.done)}"
        notes.append(line)
    return [*parts, *(f"*{_one_line(note)}*" for note in notes)]


def _embedded(attachment: Attachment) -> str:
    """Return a picture as Markdown, and a recording as a link, with the file as a data URL."""
    name = re.sub(r"[\[\]\\]", "", _one_line(attachment.name)) or attachment.kind
    link = f"[{name}]({data_url(attachment)})"
    return f"!{link}" if attachment.kind == "image" else link


def as_data(conversation: Conversation, *, tree: bool = True) -> dict[str, Any]:
    """Return the conversation as JSON values, with every message and its metrics.

    Times are in seconds since 1970. `tree` includes all branches, not only the shown path.
    """
    path = conversation.path()
    unsent = unsent_ids(conversation)
    shown = {node.id for node in path}
    nodes = path
    if tree:
        nodes = tuple(conversation.nodes.values())
    return {
        "format": _FORMAT,
        "id": conversation.id,
        "title": title_for(conversation),
        "created_s": conversation.created_s,
        "updated_s": conversation.updated_s,
        "model": conversation.model,
        "system": conversation.system,
        "policy": msgspec.to_builtins(conversation.policy),
        "head": conversation.head,
        "messages": [
            _record(node, shown=node.id in shown, sent=node.id in shown and node.id not in unsent)
            for node in nodes
        ],
    }


def _record(node: Node, *, shown: bool, sent: bool) -> dict[str, Any]:
    message = node.message
    record: dict[str, Any] = {
        "id": node.id,
        "parent": node.parent,
        "role": message.role,
        "state": node.state,
        "created_s": node.created_s,
        "text": message.content,
        "reasoning": message.reasoning,
        "shown": shown,
        "sent": sent,
        "figures": msgspec.to_builtins(node.metrics),
    }
    if message.tool_calls:
        record["tool_calls"] = msgspec.to_builtins(message.tool_calls)
    if message.tool_call_id:
        record["tool_call_id"] = message.tool_call_id
        record["name"] = message.name
    if node.run is not None:
        record["run"] = msgspec.to_builtins(node.run)
    if message.attachments:
        record["attachments"] = msgspec.to_builtins(message.attachments)
    if node.inclusions:
        record["inclusions"] = msgspec.to_builtins(node.inclusions)
    if node.replaces:
        record["replaces"] = list(node.replaces)
    if node.error:
        record["error"] = node.error
    return record


def as_json_text(conversation: Conversation) -> str:
    """Return `as_data` as a JSON document that ends in a newline."""
    return json_text(as_data(conversation), indent=2) + "\n"


def json_text(data: object, indent: int | None = None) -> str:
    """Return JSON that can be encoded: only lone surrogates are escaped."""
    text = json.dumps(data, ensure_ascii=False, indent=indent)
    return _LONE_SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _without_lone_surrogates(text: str) -> str:
    """Replace lone surrogates, because Markdown has no escape for them."""
    return _LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)


def _one_line(text: str) -> str:
    return " ".join(text.split())
