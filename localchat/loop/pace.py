"""How many tokens a step may take: the budget is time, so that a cancel within one step means something.

At most `step_target_s` a step (DESIGN: 250 ms on a CPU, 100 ms on a GPU), never under 32 tokens: below, a
step's fixed cost would eat the prefill rate.
"""

LEAST_TOKENS = 32
_FIRST_TOKENS = 64
_FOLLOW = 0.3
_MEASURABLE_TOKENS = 16
_WON_BACK = 16


class Pace:
    """Learns the time of a token in wide steps. `most_tokens`: what the runner can take in one step."""

    def __init__(self, target_s: float, most_tokens: int) -> None:
        self._target_s = target_s
        self._most = most_tokens
        self._allowed = most_tokens
        self._token_s: float | None = None

    def budget(self) -> int:
        """Tokens for the next step, drafts and decoding rows included."""
        if self._token_s is None:
            return min(_FIRST_TOKENS, self._allowed)
        wanted = int(self._target_s / self._token_s)
        return max(min(LEAST_TOKENS, self._allowed), min(self._allowed, wanted))

    def measured(self, tokens: int, elapsed_s: float) -> None:
        """A step of `tokens` went well and took so long."""
        self._allowed = min(self._most, self._allowed + max(1, self._allowed // _WON_BACK))
        if tokens < _MEASURABLE_TOKENS or elapsed_s <= 0:
            return
        token_s = elapsed_s / tokens
        if self._token_s is None:
            self._token_s = token_s
        else:
            self._token_s += _FOLLOW * (token_s - self._token_s)

    def out_of_memory(self) -> None:
        """A step did not find memory: halve what any step may take. Steps that go well win it back."""
        self._allowed = max(1, self._allowed // 2)
