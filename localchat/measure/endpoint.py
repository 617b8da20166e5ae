"""Endpoint under measurement: its address, its model, and the request fields that it accepts."""

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
_SHORT_PROBE_WORDS: Final = 16
_LONG_PROBE_WORDS: Final = 144
_EXTENSIONS: Final[Mapping[str, Any]] = {"ignore_eos": True, "timings": True}
"""Fields for answers of full length, and for the server's own counts.

localchat accepts both, vLLM, SGLang and llama.cpp some of them. Other servers ignore or reject them.
"""


@dataclass(frozen=True, slots=True)
class BenchEndpoint:
    """A server, and how to send requests to it."""

    url: str
    model: str = ""
    """Name that the server uses; empty for its first model."""
    key: str = ""
    """API key, which is never shown."""
    own: bool = False
    """True for a server process of this benchmark."""
    fields: Mapping[str, Any] = field(default_factory=lambda: dict(_EXTENSIONS))
    """Fields of every request besides messages and lengths."""
    uses_completion_limit: bool = False
    """True if the server expects `max_completion_tokens` instead of `max_tokens`."""
    scale: TokenScale = field(default_factory=TokenScale)
    properties: Mapping[str, object] = field(default_factory=dict)
    """Content of `/props`; empty if the server has no such route."""

    @property
    def client(self) -> BenchClient:
        """Client of this server."""
        return BenchClient(self.url, self.key)

    def body(self, messages: list[dict[str, str]], output_tokens: int) -> dict[str, Any]:
        """Build a streamed request."""
        body = chat_body(messages, output_tokens, {"model": self.model, **self.fields})
        if self.uses_completion_limit:
            body["max_completion_tokens"] = body.pop("max_tokens")
        return body


def prepared(endpoint: BenchEndpoint, run_id: str, temperature: float = 0.0) -> BenchEndpoint:
    """Probe a server for its model, the fields that it accepts, and its tokens per word.

    Makes the server load the model, if it does so at the first request. Raises LocalchatError.
    """
    url = base_url(endpoint.url)
    model = endpoint.model or first_model(url, endpoint.key)
    named = replace(endpoint, url=url, model=model)
    sampling = {"temperature": temperature}
    attempts = (
        replace(named, fields={**endpoint.fields, **sampling}),
        replace(named, fields=sampling),
        replace(named, fields={}, uses_completion_limit=True),
    )
    first_refusal: UsageError | None = None
    for attempt in attempts:
        try:
            probes = [
                (words, _probe(attempt, words, run_id).prompt_tokens)
                for words in (_SHORT_PROBE_WORDS, _LONG_PROBE_WORDS)
            ]
        except UsageError as problem:
            first_refusal = first_refusal or problem
            continue
        properties = server_properties(url, endpoint.key)
        return replace(attempt, scale=TokenScale.of(probes), properties=properties)
    assert first_refusal is not None
    raise first_refusal


def _probe(endpoint: BenchEndpoint, words: int, run_id: str) -> RequestSample:
    text = prose(words, f"{run_id} scale {words}")
    return ask_each(endpoint.client, [endpoint.body([{"role": "user", "content": text}], 2)])[0]


def first_model(url: str, key: str) -> str:
    """Return the first model that the server lists; empty if it lists no models.

    Raises LocalchatError.
    """
    client = RemoteClient(url, key, _QUERY_S)
    try:
        models = client.request_json("models").get("data")
    except LocalchatError as problem:
        if isinstance(problem, ModelMissing) or problem.details.get("status") in (404, 405, 501):
            return ""
        raise
    finally:
        client.close()
    if isinstance(models, list) and models and isinstance(models[0], dict):
        return str(models[0].get("id", ""))
    return ""
