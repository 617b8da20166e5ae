"""Answers requests to MODEL@NAME from the indexed documents NAME.

Only documents that the server was started with are offered.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from localchat.documents.library import DocumentLibrary, Excerpt
from localchat.engine.attachments import prepend_text
from localchat.engine.request import GenerateRequest, Message, Messages
from localchat.server.errors import bad_request
from localchat.server.generation import GenerationSpec
from localchat.server.leases import AsyncEnginePool, AsyncLease

TAKEN: Final = b"x-localchat-documents"
"""Header that names the excerpt an answer is based on."""


class NamedModel(NamedTuple):
    """The model of a request, and its documents."""

    model: str
    documents: str
    """Empty for a request without documents."""


class OfferedDocuments:
    """The documents that a server offers."""

    def __init__(self, folder: Path | None, names: Sequence[str], engines: AsyncEnginePool) -> None:
        self.names = tuple(names)
        self._engines = engines
        self._library = DocumentLibrary(folder, self._embed) if folder else None

    def split(self, model: str) -> NamedModel:
        """Split `MODEL@NAME`. Ollama's clients append `:latest`."""
        # A model's own name may contain "@", so that only known documents count.
        before, sign, after = model.rpartition("@")
        name = after.partition(":")[0]
        if sign and name in self.names:
            return NamedModel(before, name)
        return NamedModel(model, "")

    async def before(self, spec: GenerationSpec, name: str, lease: AsyncLease) -> GenerationSpec:
        """Return the generation with an excerpt of the documents. Raises ApiError, LocalchatError."""
        prompt = spec.prompts[0][0].prompt
        if not isinstance(prompt, Messages):
            raise bad_request("Documents are for conversations; this is a text.", param="model")
        excerpt = await asyncio.to_thread(self._excerpt, prompt, name, lease)
        prompts = [
            [_with_excerpt(request, excerpt) for request in fallbacks] for fallbacks in spec.prompts
        ]
        header = (TAKEN, excerpt.label.encode("ascii", "replace"))
        return dataclasses.replace(spec, prompts=prompts, headers=(*spec.headers, header))

    def _excerpt(self, prompt: Messages, name: str, lease: AsyncLease) -> Excerpt:
        assert self._library is not None
        texts = [message.content for message in prompt.messages]
        questions = [message.content for message in prompt.messages if message.role == "user"]
        return self._library.excerpt(name, "".join(questions[-1:]), lease.engine, texts)

    def _embed(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        with self._engines.pool.lease(model, "documents") as lease:
            return list(lease.engine.embed(texts, truncate=True))


def _with_excerpt(request: GenerateRequest, excerpt: Excerpt) -> GenerateRequest:
    """Add the excerpt to the request.

    Whole documents go before the first question, where the prefix cache finds them in every turn. Passages go
    before the last question, which they match.
    """
    prompt = request.prompt
    assert isinstance(prompt, Messages)
    questions = [index for index, message in enumerate(prompt.messages) if message.role == "user"]
    messages = list(prompt.messages)
    if questions:
        index = questions[0] if excerpt.whole else questions[-1]
        messages[index] = prepend_text(messages[index], excerpt.text)
    else:
        messages.append(Message("user", excerpt.text))
    return msgspec.structs.replace(
        request, prompt=msgspec.structs.replace(prompt, messages=tuple(messages))
    )
