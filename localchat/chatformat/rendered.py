"""What a chat format makes of a conversation."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, and what belongs to it.

    text: to be tokenized with control tokens recognised. add_bos: whether the tokenizer shall put
    its own first token before it (a template writes its own). opens_reasoning: the prompt ends
    inside a block of reasoning, so the answer begins there. stop: strings that end the answer.
    warnings: sentences for the user.
    """

    text: str
    add_bos: bool = False
    opens_reasoning: bool = False
    stop: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
