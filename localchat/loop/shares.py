"""How prompts share the tokens of a step."""

from localchat.loop.backend import Capabilities

_LEAST_TOKENS = 32
_AT_ONCE = 4
"""Prompts of one step. With more, each a few tokens, the first to end would end when the last one does."""


class Shares:
    """`least`: tokens that a prompt gets at least, however many write: what the runner pads them to anyway."""

    def __init__(self, can: Capabilities) -> None:
        self.least = min(max((_LEAST_TOKENS, *can.widths.prompts[:1])), can.max_step_tokens)

    def at_once(self, left: int) -> int:
        """How many prompts go on in a step with so many tokens left, but for what they leave."""
        return max(1, min(_AT_ONCE, left // max(1, self.least)))

    def of(self, left: int, prompts: int) -> int:
        """What each of so many prompts gets of the tokens left."""
        return max(self.least, left // max(1, prompts))
