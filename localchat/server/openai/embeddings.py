"""POST /v1/embeddings."""

import asyncio
import base64
import struct
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from localchat.engine.interface import Engine
from localchat.errors import UsageError
from localchat.server.config import ServerLimits
from localchat.server.errors import bad_request
from localchat.server.formatters import json_response
from localchat.server.openai.protocol import EmbeddingsBody
from localchat.server.request_body import read_json
from localchat.server.state import service_of


async def embeddings(request: Request) -> Response:
    """Embed texts. Vectors are lists, or base64 of little-endian float32, the default of OpenAI's libraries."""
    service = service_of(request)
    limits = service.config.limits
    body = await read_json(request, EmbeddingsBody, limits)
    texts = _texts(body, limits)
    encoding = body.encoding_format or "float"
    if encoding not in ("float", "base64"):
        raise bad_request(
            f"The encoding {encoding[:50]!r} is unknown; the choices are float and base64.",
            param="encoding_format",
        )
    async with await service.lease(body.model, request) as lease:
        vectors, tokens = await asyncio.to_thread(_embed, lease.engine, texts)
        name = body.model or lease.name
    size = len(vectors[0]) if vectors else 0
    if body.dimensions is not None and body.dimensions != size:
        raise bad_request(
            f"This model's vectors have {size} dimensions and cannot be shortened to {body.dimensions}.",
            param="dimensions",
        )
    data = [
        {"object": "embedding", "index": at, "embedding": _encoded(vector, encoding)}
        for at, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return json_response({"object": "list", "data": data, "model": name, "usage": usage})


def _texts(body: EmbeddingsBody, limits: ServerLimits) -> list[str]:
    given = [body.input] if isinstance(body.input, str) else body.input
    if not given or len(given) > limits.inputs:
        raise bad_request(
            f"There are {len(given)} inputs; 1 to {limits.inputs} are allowed.", param="input"
        )
    texts = [each for each in given if isinstance(each, str)]
    if len(texts) < len(given):
        raise bad_request(
            "The input contains token ids, which belong to another tokenizer; send text. In LangChain: "
            "OpenAIEmbeddings(check_embedding_ctx_length=False).",
            param="input",
            code="invalid_type",
        )
    if not all(texts):
        raise bad_request("The input contains an empty string.", param="input")
    return texts


def _embed(engine: Engine, texts: Sequence[str]) -> tuple[list[list[float]], int]:
    try:
        vectors = engine.embed(texts)
    except UsageError as error:
        if error.details.get("no_embeddings"):
            message = "This model does not give embeddings; load an embedding model and name it in 'model'."
            raise bad_request(message, param="model", code="not_supported") from error
        raise
    return vectors, sum(vectors.tokens)


def _encoded(vector: Sequence[float], encoding: str) -> list[float] | str:
    if encoding == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
