"""The guide's vocabulary: a byte-level BPE of 4,608 tokens with the pre-tokenizer of Qwen2.

A conversation becomes tokens exactly as the chat template and llama.cpp's tokenizer would make them:
special tokens are split off first, and each piece between them is tokenized as a whole.
"""

from collections.abc import Iterable
from typing import Final

from conversations import Conversation
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY: Final = 4608
HEADER: Final = "assistant\n"
END_OF_TEXT, TURN_START, TURN_END, PREFIX, SUFFIX, MIDDLE, PAD = range(7)
SPECIAL: Final = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>",
)  # fmt: skip
QWEN2_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a BPE on the texts: ids 0 to 6 are the special tokens, then the 256 bytes, then merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def pieces(talk: Conversation) -> list[tuple[int, str, bool]]:
    """(special token before, text after it, whether the model must learn to write it)."""
    if talk[0][0] == "prefix":
        return [
            (PREFIX, talk[0][1], False),
            (SUFFIX, talk[1][1], False),
            (MIDDLE, talk[2][1], True),
            (END_OF_TEXT, "", True),
        ]
    parts: list[tuple[int, str, bool]] = []
    for role, text in talk:
        parts += [(TURN_START, f"{role}\n{text}", role == "assistant"), (TURN_END, "\n", False)]
    return [*parts, (END_OF_TEXT, "", False)]


def encode(tokenizer: Tokenizer, talks: list[Conversation]) -> list[tuple[list[int], list[int]]]:
    """Per conversation: token ids, and for each token 1 where it is the model's own to say, else 0.

    Own are the answers after `assistant\\n` with the end of turn behind them.
    """
    parts = [pieces(talk) for talk in talks]
    header = len(tokenizer.encode(HEADER).ids)
    coded = iter(tokenizer.encode_batch_fast([p[1] for ps in parts for p in ps]))
    result = []
    for ps in parts:
        ids: list[int] = []
        own: list[int] = []
        spoken = False
        for special, text, learn in ps:
            piece = next(coded).ids
            ids += [special, *piece]
            head = header if text.startswith(HEADER) else 0
            own += [int(spoken or (learn and special == END_OF_TEXT))]
            own += [int(learn and i >= head) for i in range(len(piece))]
            spoken = learn
        result.append((ids, own))
    return result
