"""POST /v1/embeddings."""

import asyncio
import base64
import struct
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localchat.engine.interface import Engine
from localchat.errors import UsageError
from localchat.server.config import ServerLimits
from localchat.server.errors import bad_request
from localchat.server.formatters import json_response
from localchat.server.request_body import read_json
from localchat.server.state import service_of


class EmbeddingsBody(msgspec.Struct, frozen=True):
    """POST /v1/embeddings."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None


async def embeddings(request: Request) -> Response:
    """Embed texts.

    Vectors are lists, or base64 of little-endian float32, the default of OpenAI's libraries.
    """
    service = service_of(request)
    limits = service.config.limits
    body = await read_json(request, EmbeddingsBody)
    texts = checked_texts(body.input, limits)
    if not all(texts):
        raise bad_request("The input contains an empty string.", param="input")
    encoding = body.encoding_format or "float"
    if encoding not in ("float", "base64"):
        raise bad_request(
            f"The encoding {encoding[:50]!r} is unknown; the choices are float and base64.",
            param="encoding_format",
        )
    async with await service.lease(body.model, request) as lease:
        vectors, tokens = await asyncio.to_thread(embed, lease.engine, texts, body.dimensions)
        name = body.model or lease.name
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, encoding)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return json_response({"object": "list", "data": data, "model": name, "usage": usage})


def checked_texts(source: str | Sequence[str | int | list[int]], limits: ServerLimits) -> list[str]:
    """Return the texts to embed. Raises ApiError."""
    inputs = [source] if isinstance(source, str) else source
    if not inputs or len(inputs) > limits.inputs:
        raise bad_request(
            f"There are {len(inputs)} inputs; 1 to {limits.inputs} are allowed.", param="input"
        )
    texts = [text for text in inputs if isinstance(text, str)]
    if len(texts) < len(inputs):
        raise bad_request(
            "The input contains token ids, which belong to another tokenizer; send text. In LangChain: "
            "OpenAIEmbeddings(check_embedding_ctx_length=False).",
            param="input",
            code="invalid_type",
        )
    return texts


def embed(
    engine: Engine, texts: Sequence[str], dimensions: int | None, *, truncate: bool = False
) -> tuple[list[list[float]], int]:
    """Return the vectors and the number of tokens of the texts. Raises ApiError, LocalchatError."""
    try:
        vectors = engine.embed(texts, truncate=truncate)
    except UsageError as error:
        if error.details.get("no_embeddings"):
            message = "This model cannot compute embeddings. Load an embedding model and name it in 'model'."
            raise bad_request(message, param="model", code="not_supported") from error
        raise
    # Some models could be cut to fewer dimensions, but their files do not say so.
    size = len(vectors[0]) if vectors else 0
    if dimensions is not None and dimensions != size:
        raise bad_request(
            f"This model's vectors have {size} dimensions and cannot be shortened to {dimensions}.",
            param="dimensions",
        )
    return vectors, sum(vectors.tokens)


def _encoded(vector: Sequence[float], encoding: str) -> list[float] | str:
    if encoding == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
