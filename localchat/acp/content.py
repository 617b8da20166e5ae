"""Translates content blocks of the protocol to questions, and MCP servers to ours."""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Final, TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

from acp.schema import (
    AcpMcpServer,
    AudioContentBlock,
    BlobResourceContents,
    EmbeddedResourceContentBlock,
    HttpMcpServer,
    ImageContentBlock,
    McpServerStdio,
    ResourceContentBlock,
    SseMcpServer,
    TextContentBlock,
    TextResourceContents,
)

from localchat.chat.conversation import Inclusion, Question
from localchat.config.mcp_servers import McpServer, check_server_name
from localchat.documents.inclusion import file_text
from localchat.documents.pages import MAX_FILE_BYTES
from localchat.engine.attachments import join_parts, make_attachment
from localchat.engine.local.protocol import sendable
from localchat.engine.request import Attachment
from localchat.errors import FileMissing, UsageError, reason
from localchat.media.format import HEAD_BYTES, media_format

PromptBlock: TypeAlias = (
    TextContentBlock
    | ImageContentBlock
    | AudioContentBlock
    | ResourceContentBlock
    | EmbeddedResourceContentBlock
)
PassedServer: TypeAlias = HttpMcpServer | SseMcpServer | AcpMcpServer | McpServerStdio
_MAX_SERVER_NAME: Final = 20


def question_of(blocks: Sequence[PromptBlock]) -> Question:
    """Return the question of a prompt. Texts of resources become inclusions. Blocks.

    Raises LocalchatError for a resource that cannot be read.
    """
    parts: list[str | Attachment] = []
    labels: dict[int, str] = {}
    """Names of the parts that are texts of resources."""
    for block in blocks:
        match block:
            case TextContentBlock():
                # JSON may contain lone surrogates.
                parts.append(sendable(block.text))
            case ImageContentBlock() | AudioContentBlock():
                parts.append(make_attachment(_decoded(block.data)))
            case ResourceContentBlock():
                labels[len(parts)] = name = _name(block.uri)
                parts.append(_content(name, _read(block.uri)))
            case EmbeddedResourceContentBlock():
                labels[len(parts)] = name = _name(block.resource.uri)
                parts.append(_embedded(name, block.resource))
    content = join_parts(parts)
    inclusions = []
    position = 0
    for number, part in enumerate(parts):
        if isinstance(part, Attachment):
            continue
        start = content.text.index(part, position)
        position = start + len(part)
        if number in labels and part:
            inclusions.append(Inclusion(labels[number], start, position))
    return Question(content.text, tuple(inclusions), content.attachments)


def _decoded(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as problem:
        raise UsageError(f"the data of the prompt is not base64: {problem}") from problem


def _name(uri: str) -> str:
    """Return the name of a resource, as the model and lists of messages show it. Raises UsageError."""
    return sendable(unquote(PurePath(_parsed(uri).path).name) or uri)


def _parsed(uri: str) -> SplitResult:
    try:
        return urlsplit(uri)
    except ValueError as problem:
        raise UsageError(f"{uri} is not an address: {problem}") from problem


def _read(uri: str) -> bytes:
    """Read a file that the client links to, because the user mentioned it."""
    parts = _parsed(uri)
    if parts.scheme != "file":
        raise UsageError(f"{uri} cannot be read", hint="only files can be linked; paste its text")
    path = Path(unquote(parts.path))
    # A pipe would never end, and a cancelled prompt could not interrupt the read.
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a file")
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as problem:
        raise FileMissing(f"{path} cannot be read: {reason(problem)}") from problem


def _embedded(name: str, resource: TextResourceContents | BlobResourceContents) -> str | Attachment:
    if isinstance(resource, TextResourceContents):
        return _content(name, resource.text.encode("utf-8", "replace"))
    return _content(name, _decoded(resource.blob))


def _content(name: str, data: bytes) -> str | Attachment:
    """Return a file as a picture, a recording, or the text of a document. Raises UsageError."""
    if media_format(data[:HEAD_BYTES]) is not None:
        return make_attachment(data, name)
    return f"{file_text(name, data)}\n"


def passed_servers(
    servers: Sequence[PassedServer], own: Mapping[str, McpServer]
) -> dict[str, McpServer]:
    """Add the MCP servers of a client to our own, with names for tools. Raises UsageError."""
    passed = dict(own)
    for server in servers:
        name = _server_name(server.name, passed)
        if isinstance(server, McpServerStdio):
            values = {variable.name: variable.value for variable in server.env}
            passed[name] = McpServer(name, server.command, tuple(server.args), values=values)
        elif isinstance(server, HttpMcpServer):
            headers = {header.name: header.value for header in server.headers}
            passed[name] = McpServer(name, url=server.url, headers=headers)
        else:
            raise UsageError(
                f"the MCP server {server.name} uses {server.type}",
                hint="servers by command and by streamable HTTP work",
            )
    return passed


def _server_name(name: str, others: dict[str, McpServer]) -> str:
    short = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_MAX_SERVER_NAME]
    try:
        check_server_name(short)
    except UsageError:
        short = f"server-{short}"[:_MAX_SERVER_NAME]
    number = 2
    unique = short
    while unique in others:
        unique = f"{short[: _MAX_SERVER_NAME - 3]}-{number}"
        number += 1
    return unique
