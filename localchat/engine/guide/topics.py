"""Classifier of the guide's topics: a linear model over words and parts of words.

scripts/tools/guide/topic_classifier.py trains it on the guide's training questions. It is independent of the
guide, so an answer is wrong only if both make the same mistake.
"""

import re
import zlib
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np

FEATURES: Final = 1 << 13
_KEY_LENGTH: Final = 40
"""Characters that distinguish an answer from all others."""
_WORD: Final = re.compile(r"\d+|[+#]+|[^\W\d_]+")
_NUMBER: Final = re.compile(r"\d[\d,.]*")
_OPEN: Final = re.compile(
    r"(I know no |Here it is |There are several |Add `--stop |"
    r"localchat has no (?=.{1,40}\. `localchat --help`)).*"
)
"""Answers that repeat a word of the question in their first characters."""
KEY_CHARACTERS: Final = 80
"""Characters of an answer that `answer_key` needs."""


def topics_file(model: Path) -> Path:
    """Return the path of the classifier beside a guide's file."""
    return model.with_name("topics.npz")


def features(question: str, before: str = "") -> list[int]:
    """Return the feature ids of a question and of the question before it.

    Features are words, pairs of adjacent words, runs of three and four letters, and words of `before`.
    """
    words = _WORD.findall(question.lower())
    texts = {f"{first} {second}" for first, second in pairwise(words)}
    texts.update(f"^{word}" for word in _WORD.findall(before.lower()))
    for word in words:
        texts.add(f"={word}")
        bounded = f"<{word}>"
        for size in (3, 4):
            texts.update(bounded[start : start + size] for start in range(len(bounded) - size + 1))
    return sorted({zlib.crc32(text.encode()) % FEATURES for text in texts})


def answer_key(answer: str) -> str:
    """Return the start of an answer without numbers, which all answers of a topic share."""
    text = " ".join(answer[:KEY_CHARACTERS].split())
    return _NUMBER.sub("#", _OPEN.sub(r"\1", text))[:_KEY_LENGTH]


class Topics:
    """The classifier and its table of answers."""

    def __init__(self, path: Path) -> None:
        """path: the `.npz` file, which is read at the first question."""
        self._path = path

    @cached_property
    def _tables(self) -> "dict[str, np.ndarray]":
        import numpy as np  # takes 60 ms, while the model loads

        with np.load(self._path) as file:
            return dict(file)

    @cached_property
    def keys(self) -> list[str]:
        """The key of each topic's answer (`answer_key`)."""
        return bytes(self._tables["keys"]).decode().split("\0")

    @cached_property
    def answers(self) -> list[str]:
        """The fixed answer of each topic, empty if the answer depends on the question."""
        return bytes(self._tables["answers"]).decode().split("\0")

    def answer(self, key: str) -> str:
        """Return the fixed answer of a topic. Empty without one, or for an unknown topic."""
        return dict(zip(self.keys, self.answers, strict=True)).get(key, "")

    def answer_starting(self, start: str) -> str:
        """Return the first fixed answer that starts with this text."""
        return next(answer for answer in self.answers if answer.startswith(start))

    @cached_property
    def questions(self) -> list[str]:
        """A sample question of each topic, empty for topics that the guide refuses."""
        return bytes(self._tables["questions"]).decode().split("\0")

    @cached_property
    def languages(self) -> list[str]:
        """First sentences of answers in other languages."""
        return bytes(self._tables["languages"]).decode().split("\0")

    @cached_property
    def english(self) -> str:
        """Text that follows the first sentence in another language."""
        return bytes(self._tables["english"]).decode()

    def probabilities(self, question: str, before: str = "") -> "np.ndarray":
        """Return the probability of each topic. before: the question that this one depends on."""
        import numpy as np

        tables = self._tables
        ids = features(question, before)
        mean = tables["features"][ids].sum(0, dtype=np.float32) / max(1, len(ids)) * tables["scale"]
        logits = tables["topics"].astype(np.float32) @ mean + tables["bias"]
        weights = np.exp(logits - logits.max())
        return np.asarray(weights / weights.sum())
