"""Token budget of a step, bounded by time so that a cancel takes effect soon.

A step takes at most `step_target_s` (250 ms on a CPU, 200 ms on a GPU without decoding sequences). It has at
least 32 tokens, or as many as the kernels need, because smaller steps would lower the prefill rate.
"""

from localchat.backend_api.interface import PaddedWidth

MIN_TOKENS = 32
_FIRST_TOKENS = 64
_FOLLOW = 0.3
"""Weight of the newest measurement in the means."""
_MEASURABLE_TOKENS = 16
"""Fewer tokens measure the fixed cost only."""
_REGAIN_DIVISOR = 16
"""After a step without memory, each successful step raises the token limit by this part."""
_MIN_SPREAD = 0.1
"""Widths whose relative deviation is smaller count as equal."""
_TOLERANCE = 1.02
"""Factor by which a measured width may exceed the target."""
_RELAX = 0.9995
"""Factor for the measured time of a width that was too slow, at each step. It may have been slow by chance, or
while the machine was hot."""
_MAX_SLOWER = 1.1
_FORGET = 1.01
"""Factor for the shortest time with each step, because a machine may become slower."""


class TokenBudget:
    """Learns the fixed time of a step and the time of each token."""

    def __init__(self, target_s: float, max_tokens: int, shared_target_s: float = 0.0) -> None:
        """`max_tokens`: limit of the runner. `shared_target_s`: target of a step in which sequences decode.

        A shared target of 0 means `target_s`.
        """
        self._target_s = target_s
        self._shared_target_s = shared_target_s or target_s
        self._max_tokens = max_tokens
        self._allowed = max_tokens
        # Exponentially weighted means of tokens and seconds, variance of tokens, and covariance.
        self._tokens = 0.0
        self._seconds = 0.0
        self._variance = 0.0
        self._covariance = 0.0
        self._shortest_s = float("inf")
        self._widths_s: dict[PaddedWidth, float] = {}
        """Mean time of the steps of each width.

        It does not grow evenly, because matrix tiles fill a GPU's multiprocessors better at some widths.
        """

    def next_step(self, *, shared: bool = False, min_tokens: int = MIN_TOKENS) -> int:
        """Return the tokens of the next step, drafts and decode rows included.

        `shared`: sequences decode. `min_tokens`: the narrowest efficient step, which may miss the target.
        """
        if not self._tokens:
            return min(max(_FIRST_TOKENS, min_tokens), self._allowed)
        target_s = self._target(shared=shared)
        base_s, token_s = self._fit()
        affordable = int((target_s - base_s) / token_s)
        return max(min(min_tokens, self._allowed), min(self._allowed, affordable))

    @property
    def token_s(self) -> float:
        """Seconds per prompt token. 0: not measured yet."""
        if not self._tokens:
            return 0.0
        return self._seconds / self._tokens

    def _target(self, *, shared: bool) -> float:
        return self._shared_target_s if shared else self._target_s

    def affords(self, width: PaddedWidth, *, shared: bool = False) -> bool:
        """Return whether a step of this width is expected to stay within its target."""
        if not self._tokens or width.total > self._allowed:
            return False
        target_s = self._target(shared=shared)
        measured_s = self._widths_s.get(width)
        if measured_s is None:
            base_s, token_s = self._fit()
            return base_s + token_s * width.total <= target_s
        if measured_s <= target_s * _TOLERANCE:
            return True
        self._widths_s[width] = measured_s * _RELAX
        return False

    def observe(
        self,
        tokens: int,
        elapsed_s: float,
        *,
        prompt: bool = True,
        width: PaddedWidth | None = None,
    ) -> None:
        """Learn from a successful step of `tokens`.

        `prompt`: the step computed a prompt. Without one, a GPU spends most of the time reading weights, which
        says nothing about the cost of a token. `width`: padded width of the step.
        """
        gain = max(1, self._allowed // _REGAIN_DIVISOR)
        self._allowed = min(self._max_tokens, self._allowed + gain)
        if elapsed_s > 0:
            self._shortest_s = min(elapsed_s, self._shortest_s * _FORGET)
        if not prompt or tokens < _MEASURABLE_TOKENS or elapsed_s <= 0:
            return
        if width is not None:
            mean_s = self._widths_s.get(width, elapsed_s)
            # A slower step counts in full, up to a limit, so that few such steps follow.
            slower_s = min(elapsed_s, _MAX_SLOWER * mean_s)
            self._widths_s[width] = max(slower_s, mean_s + _FOLLOW * (elapsed_s - mean_s))
        if not self._tokens:
            self._tokens = float(tokens)
            self._seconds = elapsed_s
            return
        more = tokens - self._tokens
        longer = elapsed_s - self._seconds
        self._tokens += _FOLLOW * more
        self._seconds += _FOLLOW * longer
        self._variance = (1 - _FOLLOW) * (self._variance + _FOLLOW * more * more)
        self._covariance = (1 - _FOLLOW) * (self._covariance + _FOLLOW * more * longer)

    def _fit(self) -> tuple[float, float]:
        """Return the fixed seconds of a step, and the seconds of each token.

        Fits a line through the measurements if their widths differ enough. The fixed part never exceeds the
        shortest step. Otherwise noise could raise it above the target, and prompts would wait until no sequence
        decodes.
        """
        mean_s = self._seconds / self._tokens
        if self._variance <= (_MIN_SPREAD * self._tokens) ** 2:
            return 0.0, mean_s
        token_s = min(max(self._covariance / self._variance, mean_s / 4), mean_s)
        base_s = min(self._seconds - token_s * self._tokens, self._shortest_s)
        return base_s, (self._seconds - base_s) / self._tokens

    def halve(self) -> None:
        """Halve the token limit after a step ran out of memory. Successful steps raise it again."""
        self._allowed = max(1, self._allowed // 2)
