"""Tools for other sources: public web pages, and the documents that the user has learned."""

import asyncio
import time
from typing import Annotated, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from localchat.documents.library import DocumentLibrary
from localchat.engine.interface import Engine
from localchat.tools.tool import Plan, Tool, ToolError, own_tool

_MAX_PAGE_BYTES: Final = 8 << 20
_DEADLINE_S: Final = 30.0
_MAX_URL: Final = 2000


class FetchArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: Annotated[str, Meta(min_length=1, max_length=_MAX_URL, description="http or https.")]


class DocumentArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    question: Annotated[str, Meta(min_length=1)]
    documents: Annotated[str, Meta(description="Name of the documents.")] = ""


def page_tool(*, offline: bool) -> Tool:
    """Return the tool that reads a public web page."""

    async def plan(arguments: FetchArguments) -> Plan:
        if offline:
            raise ToolError("pages cannot be fetched, because offline is set")
        try:
            host = urlsplit(arguments.url).hostname or ""
        except ValueError as problem:
            raise ToolError(f"{arguments.url} is not an address: {problem}") from problem
        return Plan(
            lambda: asyncio.to_thread(_page, arguments.url),
            arguments.url,
            f"host {host}",
            f"all pages of {host}",
        )

    return own_tool(
        "fetch_page", "Read the text of a public web page.", "network", FetchArguments, plan
    )


def _page(url: str) -> str:
    # Imported late: httpx2 takes time, and most questions need no page.
    from localchat.documents.pages import read_document
    from localchat.documents.public_fetch import fetch_public

    data = fetch_public(url, _MAX_PAGE_BYTES, time.monotonic() + _DEADLINE_S)
    name = urlsplit(url).path.rpartition("/")[2]
    return read_document(name, data).marked()


def documents_tool(library: DocumentLibrary, engine: Engine) -> Tool:
    """Return the tool that finds passages of learned documents."""

    async def plan(arguments: DocumentArguments) -> Plan:
        names = library.names()
        name = arguments.documents.removeprefix("@")
        if not names:
            raise ToolError(
                "no documents are learned", hint="the user runs: localchat learn FOLDER"
            )
        if not name and len(names) == 1:
            (name,) = names
        if name not in names:
            raise ToolError(
                f"there are no documents {name!r}", hint=f"there are {', '.join(names)}"
            )

        def passages() -> str:
            return library.excerpt(name, arguments.question, engine).text

        return Plan(
            lambda: asyncio.to_thread(passages),
            f"@{name}: {arguments.question}",
            "documents",
            "all learned documents",
        )

    described = ", ".join(library.names()) or "none yet"
    return own_tool(
        "ask_documents",
        f"Find passages in the documents of the user that answer a question. Documents: {described}.",
        "read",
        DocumentArguments,
        plan,
    )
