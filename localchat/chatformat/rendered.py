"""What a chat format makes of a conversation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, and what belongs to it.

    text: to be tokenized with control tokens recognised. add_bos: whether the tokenizer shall put
    its own first token before it (a template writes its own). opens_reasoning: the prompt ends
    inside a block of reasoning, so the answer begins there. may_reason: the answer may begin with
    such a block. stop: strings that end the answer. warnings: sentences for the user. tools: what
    the model was told it may call.
    """

    text: str
    add_bos: bool = False
    opens_reasoning: bool = False
    may_reason: bool = False
    stop: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
