"""How many tokens a step may take: the budget is time, so that a cancel within one step means something.

At most `step_target_s` a step (250 ms on a CPU, 200 ms on a GPU where nobody writes), never under 32 tokens:
below, a step's fixed cost would eat the prefill rate.
"""

LEAST_TOKENS = 32
_FIRST_TOKENS = 64
_FOLLOW = 0.3
_MEASURABLE_TOKENS = 16
_WON_BACK = 16
_ALIKE = 0.1
_FORGET = 1.01
"""How fast the shortest step is forgotten, a step: a machine may become slower."""


class TokenBudget:
    """Learns the time of a step and of its tokens. `most_tokens`: what the runner can take in one step.
    `shared_target_s`: of steps that others write in meanwhile; 0: the same."""

    def __init__(self, target_s: float, most_tokens: int, shared_target_s: float = 0.0) -> None:
        self._target_s = target_s
        self._shared_target_s = shared_target_s or target_s
        self._most = most_tokens
        self._allowed = most_tokens
        # Exponentially weighted: means of tokens and seconds, variance of tokens, covariance.
        self._tokens = self._seconds = 0.0
        self._variance = self._covariance = 0.0
        self._shortest_s = float("inf")

    def budget(self, *, shared: bool = False) -> int:
        """Tokens for the next step, drafts and decoding rows included. `shared`: somebody writes meanwhile."""
        if not self._tokens:
            return min(_FIRST_TOKENS, self._allowed)
        target_s = self._shared_target_s if shared else self._target_s
        base_s, token_s = self._line()
        wanted = int((target_s - base_s) / token_s)
        return max(min(LEAST_TOKENS, self._allowed), min(self._allowed, wanted))

    def measured(self, tokens: int, elapsed_s: float, *, prompt: bool = True) -> None:
        """A step of `tokens` went well and took so long. `prompt`: it computed a prompt; where none was
        computed, most of a GPU's time goes into reading the weights and says nothing of a token's."""
        self._allowed = min(self._most, self._allowed + max(1, self._allowed // _WON_BACK))
        if elapsed_s > 0:
            self._shortest_s = min(elapsed_s, self._shortest_s * _FORGET)
        if not prompt or tokens < _MEASURABLE_TOKENS or elapsed_s <= 0:
            return
        if not self._tokens:
            self._tokens, self._seconds = float(tokens), elapsed_s
            return
        more, longer = tokens - self._tokens, elapsed_s - self._seconds
        self._tokens += _FOLLOW * more
        self._seconds += _FOLLOW * longer
        self._variance = (1 - _FOLLOW) * (self._variance + _FOLLOW * more * more)
        self._covariance = (1 - _FOLLOW) * (self._covariance + _FOLLOW * more * longer)

    def _line(self) -> tuple[float, float]:
        """Seconds of a step whatever its width, and of each of its tokens: the line through what was measured,
        as far as widths differed. The first is never more than the shortest of all steps took: widths that
        hardly differ make a line of noise, whose steps seem to cost more than the target before their first
        token, and prompts would wait until nobody writes."""
        mean_s = self._seconds / self._tokens
        if self._variance <= (_ALIKE * self._tokens) ** 2:
            return 0.0, mean_s
        token_s = min(max(self._covariance / self._variance, mean_s / 4), mean_s)
        base_s = min(self._seconds - token_s * self._tokens, self._shortest_s)
        return base_s, (self._seconds - base_s) / self._tokens

    def out_of_memory(self) -> None:
        """A step did not find memory: halve what any step may take. Steps that go well win it back."""
        self._allowed = max(1, self._allowed // 2)
