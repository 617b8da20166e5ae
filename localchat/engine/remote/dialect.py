"""Fields that a server rejects, learned from its errors.

Some servers reject a request with a field that they do not know. The fields here only add to an answer, so the
request is sent again without them. A field that the user set, such as `top_k`, is never left out.
"""

import re
from collections.abc import Callable
from typing import Any, Final

from localchat.errors import LocalchatError, UsageError

_NEW_MAX_TOKENS: Final = "max_completion_tokens"
"""OpenAI's name of `max_tokens` for newer models, which reject the older name."""
_CONTINUES: Final = "continue_final_message"
_OPTIONAL: Final = ("stream_options", _CONTINUES, "add_generation_prompt", "reasoning_content")
_UNKNOWN: Final = re.compile(
    r"unrecognized|unknown|unexpected|unsupported|extra[_ ]|not (?:supported|permitted|allowed|implement)",
    re.IGNORECASE,
)


class Dialect:
    """Names of fields that one server accepts."""

    def __init__(self, base: str, notify: Callable[[str], None]) -> None:
        """base: address of the server, for notices."""
        self._base = base
        self._notify = notify
        self._max_tokens = "max_tokens"
        self._rejected: set[str] = set()

    def translate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body without rejected fields, and with the server's names."""
        body = {name: value for name, value in body.items() if name not in self._rejected}
        if "messages" in body and "max_tokens" in body:
            body[self._max_tokens] = body.pop("max_tokens")
        if "reasoning_content" in self._rejected:
            body["messages"] = [_without_reasoning(message) for message in body["messages"]]
        return body

    def learn(self, failure: LocalchatError, body: dict[str, Any]) -> bool:
        """Learn from an error which fields the server rejects. Return True to send the request again."""
        message = str(failure)
        if (
            self._max_tokens != _NEW_MAX_TOKENS
            and _NEW_MAX_TOKENS in message
            and "instead" in message.lower()
        ):
            self._max_tokens = _NEW_MAX_TOKENS
            return True
        if not isinstance(failure, UsageError) or not _UNKNOWN.search(message):
            return False
        rejected = {name for name in _OPTIONAL if name in message and _contains(body, name)}
        self._rejected |= rejected
        if _CONTINUES in rejected:
            self._notify(
                f"{self._base} cannot be told to continue an answer, so it may begin a new one"
            )
        return bool(rejected)


def _contains(body: dict[str, Any], name: str) -> bool:
    return name in body or any(name in message for message in body.get("messages", ()))


def _without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "reasoning_content"}
