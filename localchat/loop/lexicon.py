"""What llguidance must know of a vocabulary: the bytes of every token, and how text becomes tokens.

Made once a model (0.5 s for 152k tokens), when the first grammar comes.
"""

from typing import TYPE_CHECKING

from localchat.loop.backend import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_SENTINEL = "\x02"
"""Put before a text, so that vocabularies that begin a text with a space put it before this."""


class _Words:
    """A Tokenizer in the shape that llguidance's TokenizerWrapper reads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens: list[bytes] = []
        self.special_token_ids: list[int] = []
        for token in range(tokenizer.vocab_size):
            piece = tokenizer.piece(token)
            if not piece:
                piece = tokenizer.piece(token, special=True)
                self.special_token_ids.append(token)
            self.tokens.append(piece)
        self.eos_token_id = tokenizer.eos if tokenizer.eos >= 0 else min(tokenizer.eog, default=0)
        self.bos_token_id = tokenizer.bos if tokenizer.bos >= 0 else None
        self._before = tokenizer.encode(_SENTINEL)

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens whose bytes are exactly `text`; those of its bytes one by one where the vocabulary has no
        such tokens (it folds or drops something)."""
        words = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        tokens = self._tokenizer.encode(_SENTINEL + words)
        begin = len(self._before)
        if tokens[:begin] == self._before:
            return tokens[begin:]
        return self._tokenizer.encode(words)


def lexicon(tokenizer: Tokenizer) -> "LLTokenizer":
    """The vocabulary for llguidance. Tokens that print nothing count as special: a grammar reaches them by
    number only, as `<[7]>`. Masks have one bit for each token of `tokenizer`."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(
        TokenizerWrapper(_Words(tokenizer)),
        n_vocab=tokenizer.vocab_size,
        eos_token=sorted(tokenizer.eog) or None,
    )
