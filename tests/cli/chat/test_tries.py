"""More tries at one answer: votes, the best of several, and a critique."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from localchat.cli.context import AppContext
from localchat.engine.events import Event, Finished, Text, TokenLogprob
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest
from tests.support.cli_program import BEGIN, ScriptedApp
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine
from tests.support.terminal_screen import Call


@dataclass
class Answers:
    """An application whose engine gives these answers, one after the other."""

    answers: Sequence[tuple[Event, ...]]
    engine: ScriptedEngine = field(init=False)
    options: list[EngineOptions] = field(default_factory=list)

    def __post_init__(self) -> None:
        def script(request: GenerateRequest) -> ScriptedAnswer:
            return ScriptedAnswer(events=self.answers[len(self.engine.requests) - 1])

        self.engine = ScriptedEngine(script)

    def app(self) -> ScriptedApp:
        used = ScriptedApp(())
        used.app = AppContext(open_engine=self._open)
        return used

    def _open(self, options: EngineOptions, notify: Callable[[str], None]) -> ScriptedEngine:
        self.options.append(options)
        return self.engine


def _whole(*texts: str, order: Sequence[int] = ()) -> tuple[Event, ...]:
    events: list[Event] = []
    for choice in order or range(len(texts)):
        events += [Text(choice, texts[choice]), Finished(choice, "stop")]
    return tuple(events)


def test_a_vote_prints_an_answer_that_most_agree_on_and_cancels_the_rest(call: Call) -> None:
    answers = Answers([_whole("so 5", "it is 4", "4 I say", "4", "9", order=(1, 2, 0, 3))])
    code, out, err = call(answers.app(), "--vote", "5", "--stats", "2 + 2?")
    assert (code, out) == (0, "it is 4\n")
    assert "5 tries: 3 say 4, 1 say 5, 1 cancelled, the first alone differs" in err
    assert answers.engine.requests[0].n == 5
    assert answers.options[0].load.max_slots >= 5


def test_on_a_terminal_several_tries_say_what_they_cost(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*flags: str) -> str:
        return call(Answers([_whole("4", "4", "4")]).app(), "--vote", "3", *flags, "2 + 2?").err

    assert "tries: " not in told()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "3 tries: " in told()
    assert "tries: " not in told("-q")


def test_a_decided_vote_does_not_wait_for_the_tries_that_are_left(call: Call) -> None:
    app = ScriptedApp((*BEGIN, *_whole("4", "4"), 30.0, *_whole("5", "5", "5")[-1:]))
    assert call(app, "--vote", "3", "2 + 2?")[:2] == (0, "4\n")
    assert app.engines[0].cancelled == 1


def test_a_vote_in_json_has_counts_cost_and_every_try(call: Call) -> None:
    answers = Answers([_whole("4", "5", "4", order=(0, 1, 2))])
    out = call(answers.app(), "--vote", "3", "--json", "2 + 2?").out
    told = json.loads(out)
    assert told["text"] == "4"
    assert [one["text"] for one in told["choices"]] == ["4", "5", "4"]
    tries = told["tries"]
    assert (tries["method"], tries["votes"], tries["chosen"]) == ("vote", {"4": 2, "5": 1}, 0)


def test_what_a_vote_counts_can_be_chosen(call: Call) -> None:
    texts = ("yes, 1", "no, 2", "No, 3")
    assert call(Answers([_whole(*texts)]).app(), "--vote", "3", "q").out == "yes, 1\n"
    by = ("--vote-by", r"regex:(?i)no\b")
    assert call(Answers([_whole(*texts)]).app(), "--vote", "3", *by, "q").out == "no, 2\n"
    fields = ('{"a": 1, "b": 1}', '{"a": 2, "b": 2}', '{"a": 2, "b": 3}')
    by = ("--vote-by", "field:a")
    assert call(Answers([_whole(*fields)]).app(), "--vote", "3", *by, "q").out == fields[1] + "\n"


def test_the_best_is_printed_and_is_the_answer_in_the_history(call: Call) -> None:
    logprobs = (-2.0, -0.25, -1.0)
    events: list[Event] = []
    for choice, value in enumerate(logprobs):
        events.append(Text(choice, f"try {choice}", (TokenLogprob(1, b"", value),)))
        events.append(Finished(choice, "stop"))
    answers = Answers([tuple(events)])
    code, out, err = call(answers.app(), "--best-of", "3", "--stats", "hi")
    assert (code, out) == (0, "try 1\n")
    assert "try 2 has mean log probability -0.250, the first has -2.000" in err
    assert answers.engine.requests[0].logprobs == 0
    kept = json.loads(call(ScriptedApp(()), "history", "list", "--json").out)
    assert "try 1" in call(ScriptedApp(()), "history", "show", kept[0]["id"]).out


def test_a_judge_picks_among_the_tries(call: Call) -> None:
    answers = Answers([_whole("a", "b"), _whole('{"best": 2}')])
    assert call(answers.app(), "--best-of", "2", "--judge", "hi").out == "b\n"
    verdict = answers.engine.requests[1]
    assert (verdict.n, verdict.sampling.temperature) == (1, 0.0)
    unsure = Answers([_whole("a", "b"), _whole("hm")])
    code, out, err = call(unsure.app(), "--best-of", "2", "--judge", "hi")
    assert (code, out) == (0, "a\n")
    assert "the first try was kept" in err


def test_a_critique_mends_the_faults_that_it_finds(call: Call) -> None:
    review = [_whole("5"), _whole('{"faults": ["it is 4"]}'), _whole("4")]
    wins = [_whole('{"best": 2}'), _whole('{"best": 1}')]
    answers = Answers([*review, *wins])
    code, out, err = call(answers.app(), "--critique", "--stats", "2 + 2?")
    assert (code, out) == (0, "4\n")
    assert "critique: 1 fault found, answer corrected · 5 tokens" in err
    told = Answers([*review, *wins])
    tries = json.loads(call(told.app(), "--critique", "--json", "2 + 2?").out)
    assert (tries["text"], tries["tries"]["faults"]) == ("4", ["it is 4"])
    assert (tries["tries"]["first"], tries["tries"]["second"]) == ("5", "4")
    assert tries["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("verdicts", [["1"], ["2", "2"], ["2", "none"]])
def test_the_first_answer_stays_unless_the_second_wins_in_both_orders(
    call: Call, verdicts: Sequence[str]
) -> None:
    replies = [_whole(f'{{"best": {best}}}') for best in verdicts]
    review = [_whole("right"), _whole('{"faults": ["it is short"]}'), _whole("wrong")]
    outcome = call(Answers([*review, *replies]).app(), "--critique", "--json", "q")
    answer = json.loads(outcome.out)
    assert answer["text"] == "right"
    assert (answer["tries"]["mended"], answer["tries"]["second"]) == (False, "wrong")


def test_the_guide_does_not_judge(call: Call) -> None:
    refused = call(Answers([]).app(), "-m", "guide", "--critique", "q", named=False)
    assert refused.code == 2
    assert "the built-in guide cannot judge answers" in refused.err


def test_an_answer_without_faults_stays(call: Call) -> None:
    answers = Answers([_whole("4"), _whole('{"faults": []}')])
    assert call(answers.app(), "--critique", "2 + 2?").out == "4\n"
    assert len(answers.engine.requests) == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--vote", "3", "--best-of", "3", "q"), "cannot be combined"),
        (("--vote", "3", "--n", "2", "q"), "--n asks for several"),
        (("--vote", "3", "-i", "q"), "-i is a conversation"),
        (("--judge", "q"), "--best-of"),
        (("--vote-by", "text", "q"), "--vote counts"),
        (("--vote", "3", "--vote-by", "size", "q"), "cannot be counted by 'size'"),
        (("--vote", "3", "--temperature", "0", "q"), "every try gives the same"),
        (("--critique", "--raw-prompt", "q"), "--raw-prompt has none"),
        (("--vote", "1", "q"), "2<=x<=16"),
        (("--vote", "3"), "there is nothing to ask"),
    ],
)
def test_what_cannot_be_together_is_refused(call: Call, args: tuple[str, ...], said: str) -> None:
    code, out, err = call(Answers([]).app(), *args)
    assert (code, out) == (2, "")
    assert said in err
