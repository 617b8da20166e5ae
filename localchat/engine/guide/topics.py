"""Topics of the guide's questions: a linear classifier over words and pieces of words, apart from the guide.

Trained by scripts/tools/guide/topic_classifier.py on the questions of the training of the guide. It reads a
question and the one before it and writes nothing, so where both name one topic, both would have to be wrong in
one way.
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
HEAD: Final = 40
"""Characters of an answer that tell it from all others."""
_WORD: Final = re.compile(r"\d+|[+#]+|[^\W\d_]+")
_NUMBER: Final = re.compile(r"\d[\d,.]*")
_OPEN: Final = re.compile(
    r"(I know no |Here it is |There are several |Add `--stop |"
    r"localchat has no (?=.{1,40}\. `localchat --help`)).*"
)
"""Answers that repeat a word of the question early on."""
HELD: Final = 80
"""Characters that are enough for `answer_key`."""


def features(question: str, before: str = "") -> list[int]:
    """Ids of the words, neighbouring words, and pieces of three and four letters of a question, and of the
    words of the question before it.
    """
    words = _WORD.findall(question.lower())
    found = {f"{one} {two}" for one, two in pairwise(words)}
    found.update(f"^{word}" for word in _WORD.findall(before.lower()))
    for word in words:
        edged = f"<{word}>"
        found.add(f"={word}")
        for size in (3, 4):
            found.update(edged[at : at + size] for at in range(len(edged) - size + 1))
    return sorted({zlib.crc32(text.encode()) % FEATURES for text in found})


def answer_key(answer: str) -> str:
    """The beginning of an answer without its numbers: equal for all answers of one topic."""
    text = " ".join(answer[:HELD].split())
    return _NUMBER.sub("#", _OPEN.sub(r"\1", text))[:HEAD]


class Topics:
    """The classifier. `path`: its file, which is read at the first question."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _tables(self) -> "dict[str, np.ndarray]":
        import numpy as np  # 60 ms, while the model loads

        with np.load(self._path) as file:
            return dict(file)

    @cached_property
    def keys(self) -> list[str]:
        """The key of each topic's answer (`answer_key`)."""
        return bytes(self._tables["keys"]).decode().split("\0")

    @cached_property
    def answers(self) -> list[str]:
        """The answer of each topic; empty where it depends on the question."""
        return bytes(self._tables["answers"]).decode().split("\0")

    def answer(self, key: str) -> str:
        """The answer of a topic; empty where it depends on the question, or there is no such topic."""
        return dict(zip(self.keys, self.answers, strict=True)).get(key, "")

    @cached_property
    def questions(self) -> list[str]:
        """A question for each topic that the guide answers; empty where there is none."""
        return bytes(self._tables["questions"]).decode().split("\0")

    @cached_property
    def languages(self) -> list[str]:
        """The sentences with which answers in other languages begin."""
        return bytes(self._tables["languages"]).decode().split("\0")

    @cached_property
    def english(self) -> str:
        """What follows them, whatever was asked."""
        return bytes(self._tables["english"]).decode()

    def probabilities(self, question: str, before: str = "") -> "np.ndarray":
        """The probability of each topic. `before`: the question that this one leans on."""
        import numpy as np

        tables = self._tables
        ids = features(question, before)
        mean = tables["features"][ids].sum(0, dtype=np.float32) / max(1, len(ids)) * tables["scale"]
        logits = tables["topics"].astype(np.float32) @ mean + tables["bias"]
        weights = np.exp(logits - logits.max())
        return np.asarray(weights / weights.sum())
