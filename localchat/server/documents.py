"""Documents behind a model: requests to MODEL@NAME are answered from the documents NAME.

Only documents that the server was started with are offered.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from localchat.documents.library import DocumentLibrary, Excerpt
from localchat.engine.request import GenerateRequest, Message, Messages
from localchat.server.errors import bad_request
from localchat.server.generation import GenerationSpec
from localchat.server.leases import AsyncEnginePool, AsyncLease

TAKEN: Final = b"x-localchat-documents"
"""Header with what an answer was given of the documents."""


class NamedModel(NamedTuple):
    """The model of a request, and the documents behind it; empty: none."""

    model: str
    documents: str


class OfferedDocuments:
    """The documents that a server offers."""

    def __init__(self, folder: Path | None, names: Sequence[str], engines: AsyncEnginePool) -> None:
        self.names = tuple(names)
        self._engines = engines
        self._library = DocumentLibrary(folder, self._embed) if folder is not None else None

    def split(self, model: str) -> NamedModel:
        """`MODEL@NAME` in its parts. Ollama's clients put `:latest` behind it."""
        before, sign, after = model.rpartition("@")
        name = after.partition(":")[0]
        if sign and name in self.names:
            return NamedModel(before, name)
        return NamedModel(model, "")

    async def before(self, spec: GenerationSpec, name: str, lease: AsyncLease) -> GenerationSpec:
        """The generation with what its question gets of the documents. Raises ApiError, LocalchatError."""
        prompt = spec.prompts[0][0].prompt
        if not isinstance(prompt, Messages):
            raise bad_request("Documents are for conversations; this is a text.", param="model")
        excerpt = await asyncio.to_thread(self._excerpt, prompt, name, lease)
        prompts = [[_behind(excerpt, one) for one in fallbacks] for fallbacks in spec.prompts]
        header = (TAKEN, excerpt.label.encode("ascii", "replace"))
        return dataclasses.replace(spec, prompts=prompts, headers=(*spec.headers, header))

    def _excerpt(self, prompt: Messages, name: str, lease: AsyncLease) -> Excerpt:
        assert self._library is not None
        asked = [message.content for message in prompt.messages if message.role == "user"]
        sent = [message.content for message in prompt.messages]
        return self._library.excerpt(name, asked[-1] if asked else "", lease.engine, sent)

    def _embed(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        with self._engines.pool.lease(model, "documents") as lease:
            return list(lease.engine.embed(texts, truncate=True))


def _behind(excerpt: Excerpt, request: GenerateRequest) -> GenerateRequest:
    """The request with the excerpt: all documents before the first question, where the prefix cache finds them
    with each turn; passages before the last one, which they were found for."""
    prompt = request.prompt
    assert isinstance(prompt, Messages)
    asked = [at for at, message in enumerate(prompt.messages) if message.role == "user"]
    messages = list(prompt.messages)
    if asked:
        at = asked[0 if excerpt.whole else -1]
        text = f"{excerpt.text}{messages[at].content}"
        messages[at] = msgspec.structs.replace(messages[at], content=text)
    else:
        messages.append(Message("user", excerpt.text))
    return msgspec.structs.replace(
        request, prompt=msgspec.structs.replace(prompt, messages=tuple(messages))
    )
