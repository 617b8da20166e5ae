"""Queries of an engine over the frames of `protocol.py`, for a child process and for a running server."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from localchat.engine.events import EngineStats
from localchat.engine.interface import EngineInfo, Vectors
from localchat.engine.local import protocol
from localchat.engine.request import Messages

Reply = TypeVar("Reply", bound=msgspec.Struct)


class FrameQueries:
    """The queries of `Engine`, for engines that send frames. A subclass defines `_query`."""

    def _query(self, make_query: Callable[[int], protocol.Query], kind: type[Reply]) -> Reply:
        """Send the query that `make_query` builds for an id, and return its reply."""
        raise NotImplementedError

    def embed(self, texts: Sequence[str], *, truncate: bool = False) -> Vectors:
        reply = self._query(
            lambda id_: protocol.Embed(id_, tuple(texts), truncate=truncate), protocol.VectorsReply
        )
        return Vectors(reply.vectors, reply.tokens)

    def prompt_tokens(self, messages: Messages) -> list[int]:
        reply = self._query(lambda id_: protocol.PromptTokens(id_, messages), protocol.TokensReply)
        return list(reply.tokens)

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        reply = self._query(lambda id_: protocol.Tokenize(id_, text, special), protocol.TokensReply)
        return list(reply.tokens)

    def detokenize(self, tokens: Sequence[int]) -> str:
        reply = self._query(lambda id_: protocol.Detokenize(id_, tuple(tokens)), protocol.TextReply)
        return reply.text

    def render(self, messages: Messages) -> str:
        return self._query(lambda id_: protocol.Render(id_, messages), protocol.TextReply).text

    def info(self) -> EngineInfo:
        return self._query(protocol.GetInfo, protocol.InfoReply).info

    def stats(self) -> EngineStats:
        return self._query(protocol.GetStats, protocol.StatsReply).stats
