"""HTML's `</s>` in Gemma's and Qwen's vocabularies is text, not the end of an answer."""

from pathlib import Path

from localchat.engine.request import GenerateRequest, Sampling, TextPrompt
from tests.real.conftest import OpenEngine
from tests.support.answers import ask


def test_gemma_continues_after_an_html_tag(gemma: Path, open_engine: OpenEngine) -> None:
    engine = open_engine(gemma, context_tokens=256)
    tokens = engine.tokenize("<s>10 dollars</s>")
    assert engine.detokenize(tokens[-1:]) == "</s>"
    prompt = TextPrompt("<p>Old price: <s>10 dollars", special=True)
    answer = ask(engine, GenerateRequest(prompt, Sampling(temperature=0), max_tokens=12))
    assert answer.text.startswith("</s>")
    assert answer.reasons == ["length"]


def test_qwen_tokenizes_an_html_tag_as_its_own_tokenizer_does(
    qwen: Path, open_engine: OpenEngine
) -> None:
    engine = open_engine(qwen, context_tokens=256)
    for special in (False, True):
        pieces = [engine.detokenize([token]) for token in engine.tokenize("a</s>", special=special)]
        assert pieces == ["a", "</", "s", ">"]
