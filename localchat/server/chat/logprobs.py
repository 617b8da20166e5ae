"""Log probabilities of tokens, as OpenAI's chat API writes them."""

import msgspec

from localchat.engine.events import TokenLogprob


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


def chat_logprobs(logprobs: tuple[TokenLogprob, ...]) -> list[ChatTokenLogprob]:
    return [
        ChatTokenLogprob(
            _decode(token.text),
            token.logprob,
            list(token.text),
            [TopLogprob(_decode(text), logprob, list(text)) for _, text, logprob in token.top],
        )
        for token in logprobs
    ]


def _decode(token: bytes) -> str:
    return token.decode("utf-8", "replace")
