"""Token budget of a step, bounded by time so that a cancel takes effect soon.

A step takes at most `step_target_s` (250 ms on a CPU, 200 ms on a GPU where nobody decodes) and is never
under 32 tokens: below that, a step's fixed cost would eat the prefill rate.
"""

from localchat.backend_api.interface import PaddedWidth

LEAST_TOKENS = 32
_FIRST_TOKENS = 64
_FOLLOW = 0.3
"""Weight of the newest measurement in the means."""
_MEASURABLE_TOKENS = 16
"""Fewer tokens measure the fixed cost only."""
_WON_BACK = 16
"""A successful step wins back this part of the tokens that a step may have."""
_ALIKE = 0.1
"""Widths that differ by a smaller share count as one."""
_CLOSE = 1.02
"""A width that was measured may take so many times the target."""
_RELAX = 0.9995
"""Factor of the measured time of a width with each step that it was too slow for: one may have been slow by
chance, or while the machine was hot."""
_MOST_SLOWER = 1.1
_FORGET = 1.01
"""Factor by which the shortest step is forgotten with each step: a machine may become slower."""


class TokenBudget:
    """Learns the time of a step and of its tokens."""

    def __init__(self, target_s: float, most_tokens: int, shared_target_s: float = 0.0) -> None:
        """`most_tokens`: what the runner can take in one step. `shared_target_s`: target of a
        step in which other sequences decode; 0: the same as `target_s`."""
        self._target_s = target_s
        self._shared_target_s = shared_target_s or target_s
        self._most = most_tokens
        self._allowed = most_tokens
        # Exponentially weighted: means of tokens and seconds, variance of tokens, covariance.
        self._tokens = self._seconds = 0.0
        self._variance = self._covariance = 0.0
        self._shortest_s = float("inf")
        self._widths_s: dict[PaddedWidth, float] = {}
        """Mean time of the steps of each width. It does not grow evenly: the tiles of a GPU's products fill
        its multiprocessors well at some widths and badly at others."""

    def next_step(self, *, shared: bool = False) -> int:
        """Tokens of the next step, drafts and decode rows included. `shared`: other sequences
        decode."""
        if not self._tokens:
            return min(_FIRST_TOKENS, self._allowed)
        target_s = self._target(shared=shared)
        base_s, token_s = self._fit()
        affordable = int((target_s - base_s) / token_s)
        return max(min(LEAST_TOKENS, self._allowed), min(self._allowed, affordable))

    @property
    def token_s(self) -> float:
        """Seconds of a prompt's token; 0: not measured yet."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def _target(self, *, shared: bool) -> float:
        return self._shared_target_s if shared else self._target_s

    def affords(self, width: PaddedWidth, *, shared: bool = False) -> bool:
        """Whether a step of this width takes no longer than it may, as far as is known."""
        if not self._tokens or width.total > self._allowed:
            return False
        target_s = self._target(shared=shared)
        measured_s = self._widths_s.get(width)
        if measured_s is None:
            base_s, token_s = self._fit()
            return base_s + token_s * width.total <= target_s
        if measured_s <= target_s * _CLOSE:
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

        `prompt`: it computed a prompt; without one, most of a GPU's time goes into reading the
        weights and shows nothing of the cost of a token. `width`: to which it was padded.
        """
        self._allowed = min(self._most, self._allowed + max(1, self._allowed // _WON_BACK))
        if elapsed_s > 0:
            self._shortest_s = min(elapsed_s, self._shortest_s * _FORGET)
        if not prompt or tokens < _MEASURABLE_TOKENS or elapsed_s <= 0:
            return
        if width is not None:
            known_s = self._widths_s.get(width, elapsed_s)
            # A step that was too long counts in full, unless by much, so that few follow it.
            slower = min(elapsed_s, _MOST_SLOWER * known_s)
            self._widths_s[width] = max(slower, known_s + _FOLLOW * (elapsed_s - known_s))
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
        """Seconds of a step whatever its width, and of each of its tokens.

        A line through the measurements, as far as their widths differed. The fixed part is never
        more than the shortest step took: widths that hardly differ make a line of noise, whose
        steps seem to cost more than the target before their first token, and prompts would wait
        until nobody decodes.
        """
        mean_s = self._seconds / self._tokens
        if self._variance <= (_ALIKE * self._tokens) ** 2:
            return 0.0, mean_s
        token_s = min(max(self._covariance / self._variance, mean_s / 4), mean_s)
        base_s = min(self._seconds - token_s * self._tokens, self._shortest_s)
        return base_s, (self._seconds - base_s) / self._tokens

    def halve(self) -> None:
        """Halve the tokens of all steps after one ran out of memory. Successful steps win them
        back."""
        self._allowed = max(1, self._allowed // 2)
