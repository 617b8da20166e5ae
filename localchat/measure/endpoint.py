"""Endpoint under measurement: its address, the model, and which fields of a request it takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from localchat.engine.remote.client import RemoteClient, base_url
from localchat.errors import LocalchatError, ModelMissing, UsageError
from localchat.measure.client import BenchClient, RequestSample
from localchat.measure.load import ask_each
from localchat.measure.server_process import server_properties
from localchat.measure.workload import TokenScale, chat_body, prose

_QUERY_S: Final = 30.0
_FEW_WORDS = 16
_MANY_WORDS = 144
_EXTENSIONS: Final[Mapping[str, Any]] = {"ignore_eos": True, "timings": True}
"""Answers as long as asked for, and the server's own counts: known to localchat, and in part to vLLM, SGLang
and llama.cpp. Others ignore or refuse them."""


@dataclass(frozen=True, slots=True)
class BenchEndpoint:
    """A server, as requests are sent to it."""

    url: str
    model: str = ""
    """The server's name of it; empty: its first."""
    key: str = ""
    """Shown nowhere."""
    own: bool = False
    """It is a server process of this benchmark."""
    fields: Mapping[str, Any] = field(default_factory=lambda: dict(_EXTENSIONS))
    """Of every request, besides messages and lengths."""
    new_name: bool = False
    """The server calls `max_tokens` `max_completion_tokens`."""
    scale: TokenScale = field(default_factory=TokenScale)
    properties: Mapping[str, object] = field(default_factory=dict)
    """Of `/props`, where the server has it."""

    @property
    def client(self) -> BenchClient:
        """A client of this server."""
        return BenchClient(self.url, self.key)

    def body(self, messages: list[dict[str, str]], output_tokens: int) -> dict[str, Any]:
        """A streamed request."""
        body = chat_body(messages, output_tokens, {"model": self.model, **self.fields})
        if self.new_name:
            body["max_completion_tokens"] = body.pop("max_tokens")
        return body


def prepared(endpoint: BenchEndpoint, run: str, temperature: float = 0.0) -> BenchEndpoint:
    """Find out the model, the fields that the server takes, and how many tokens a word has.

    Loads the model, where the server does so at the first request. Raises LocalchatError."""
    url = base_url(endpoint.url)
    model = endpoint.model or first_model(url, endpoint.key)
    named = replace(endpoint, url=url, model=model)
    sampling = {"temperature": temperature}
    attempts = (
        replace(named, fields={**endpoint.fields, **sampling}),
        replace(named, fields=sampling),
        replace(named, fields={}, new_name=True),
    )
    refused: UsageError | None = None
    for attempt in attempts:
        try:
            few = _probe(attempt, _FEW_WORDS, run)
            many = _probe(attempt, _MANY_WORDS, run)
        except UsageError as problem:
            refused = refused or problem
            continue
        scale = TokenScale.of([(_FEW_WORDS, few.prompt_tokens), (_MANY_WORDS, many.prompt_tokens)])
        return replace(attempt, scale=scale, properties=server_properties(url, endpoint.key))
    assert refused is not None
    raise refused


def _probe(endpoint: BenchEndpoint, words: int, run: str) -> RequestSample:
    text = prose(words, f"{run} scale {words}")
    return ask_each(endpoint.client, [endpoint.body([{"role": "user", "content": text}], 2)])[0]


def first_model(url: str, key: str) -> str:
    """The first model that the server lists; empty where it lists none. Raises LocalchatError."""
    client = RemoteClient(url, key, _QUERY_S)
    try:
        listed = client.request_json("models").get("data")
    except LocalchatError as problem:
        if isinstance(problem, ModelMissing) or problem.details.get("status") in (404, 405, 501):
            return ""
        raise
    finally:
        client.close()
    first = listed[0] if isinstance(listed, list) and listed else {}
    if isinstance(first, dict):
        return str(first.get("id", ""))
    return ""
