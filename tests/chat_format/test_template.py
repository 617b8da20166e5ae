"""The template renderer, with templates of our own."""

from datetime import datetime
from typing import Any

import pytest

from localchat.chat_format.render_process import RenderLimits, RenderProcess
from localchat.chat_format.template import ChatTemplate
from localchat.errors import TemplateError
from tests.support.chat_templates import RENDER_PROCESS

USER = {"role": "user", "content": "hi"}
TALK = [USER, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "more"}]
HASTY = RenderProcess(RenderLimits(seconds=0.3, compile_seconds=1.0))


def template(source: str, process: RenderProcess = RENDER_PROCESS) -> ChatTemplate:
    return ChatTemplate(
        source,
        {"bos_token": "<s>", "eos_token": "</s>"},
        process=process,
        now=lambda: datetime(2026, 3, 7, 9, 5),
    )


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return template(source).render(TALK if messages is None else messages, options=options)


def reason(source: str, process: RenderProcess = HASTY) -> str:
    """Why the template was refused."""
    with pytest.raises(TemplateError) as raised:
        template(source, process).render(TALK)
    return str(raised.value.details["reason"])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hi</s>"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
         "{{ ns.n }}", "3"),
        ("{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}"
         "{% if loop.last %}{% break %}{% endif %}{{ m.content }}{% endfor %}", "hi"),
        ("{% macro say(m, sep='|') %}{{ m.role }}{{ sep }}{{ caller() if caller else '' }}"
         "{% endmacro %}{{ say(messages[0]) }}{% call say(messages[1], sep='/') %}x{% endcall %}",
         "user|assistant/x"),
        ("{{ {'b': '<ü>', 'a': [1, none, true]} | tojson }}", '{"b": "<ü>", "a": [1, null, true]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ 'ü' | tojson(ensure_ascii=true) }}", '"\\u00fc"'),
        ("{{ strftime_now('%d %b %Y') }}", "07 Mar 2026"),
        ("{{ messages[0].get('name', 'none') }}{% for k, v in messages[0].items() %}"
         "{{ k }}={{ v }};{% endfor %}", "nonerole=user;content=hi;"),
        ("{{ messages[1:] | length }}{{ 'abcdef'[::-2] }}{{ messages[-1]['content'][:2] }}",
         "2fdbmo"),
        ("  {% if true %}\n    x\n  {% endif %}\n", "    x\n"),
        ("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c", "abhic"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content')"
         " | join('+') }}",
         "hi+more"),
        ("{{ 'a' ~ 1 ~ none }}{{ '%s-%03d' % ('x', 7) }}{{ '{0:>3}'.format('y') }}",
         "a1Nonex-007  y"),
        ("{{ documents is none }}{{ tools is none }}{{ add_generation_prompt }}", "TrueTrueTrue"),
        ("{{ [[1, 2], [3]] | sum(start=[]) }}{{ [1, 2] | sum }}", "[1, 2, 3]3"),
        ("{{ dict(a=1)['a'] }}{{ {'b': 2, 'a': 1} | dictsort | first | first }}", "1a"),
        ("{{ ('a' * 3) + 'b' * 2 }}{{ 7 // 2 }}{{ 2 ** 5 }}", "aaabb332"),
        ("{{ missing }}{{ missing is defined }}", "False"),
    ],
)  # fmt: skip
def test_the_constructs_of_chat_templates_give_their_text(source: str, text: str) -> None:
    assert render(source) == text


def test_options_reach_the_template_and_override_special_tokens() -> None:
    assert render("{{ enable_thinking }}{{ bos_token }}", enable_thinking=False, bos_token="B") == (
        "FalseB"
    )


def test_an_option_may_not_take_the_place_of_the_messages() -> None:
    with pytest.raises(TemplateError, match="messages"):
        template("x").render(TALK, options={"messages": []})


def test_what_is_no_plain_data_is_refused() -> None:
    with pytest.raises(TemplateError, match="plain data"):
        render("{{ thing }}", thing=object())


def test_data_nested_too_deep_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TemplateError, match="nest too deep") as raised:
        render("x", deep=deep)
    assert raised.value.details["reason"] == "limit"


def test_switches_of_a_template_are_listed() -> None:
    switch = template("{% set a = 1 %}{{ a }}{% if enable_thinking %}{% endif %}")
    assert switch.variables() == {"enable_thinking"}


def test_raise_exception_refuses_with_the_words_of_the_template() -> None:
    with pytest.raises(TemplateError, match="Roles must alternate") as raised:
        render("a\n{{ raise_exception('Roles must alternate') }}")
    assert raised.value.details == {"reason": "refused", "line": 2}


def test_a_failing_template_is_named_with_its_line() -> None:
    with pytest.raises(TemplateError, match="line 3: UndefinedError") as raised:
        render("a\nb\n{{ nothing.at.all }}")
    assert raised.value.details["reason"] == "broken"


def test_a_template_that_cannot_be_read_is_named_with_its_line() -> None:
    with pytest.raises(TemplateError, match="line 2") as raised:
        render("a\n{% if %}")
    assert raised.value.details["reason"] == "syntax"


HUNDRED_THOUSAND = "{% for a in range(100000) %}"


@pytest.mark.parametrize(
    "source",
    [
        f"{HUNDRED_THOUSAND * 3}{'{% endfor %}' * 3}",
        f"{HUNDRED_THOUSAND * 2}{{% for b in range(9) if false %}}{{% endfor %}}{'{% endfor %}' * 2}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(50) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% block b %}{{ self.b() }}{% endblock %}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        f"{HUNDRED_THOUSAND}{{{{ range(100000) | map('upper') | list | length }}}}{{% endfor %}}",
        f"{HUNDRED_THOUSAND}{{{{ range(100000) | select('odd') | list | length }}}}{{% endfor %}}",
    ],
)
def test_an_endless_template_is_stopped(source: str) -> None:
    assert reason(source) == "limit"


DOUBLING = (
    "{% set n = namespace(x=START) %}{% for i in range(99) %}{% set n.x = STEP %}{% endfor %}"
)


def doubling(start: str, step: str) -> str:
    return DOUBLING.replace("START", start).replace("STEP", step)


EXPLODING = [
    "{{ 'a' * 10**10 }}",
    "{{ [1] * 10**9 }}",
    doubling("'a'", "n.x + n.x"),
    doubling("'a'", "n.x ~ n.x"),
    doubling("[1]", "n.x + n.x"),
    doubling("[1]", "[n.x] * 9") + "{{ n.x }}",
    doubling("[1]", "[n.x, n.x]") + "{{ n.x }}",
    doubling("(1,)", "(n.x, n.x)") + "{{ n.x | tojson }}",
    doubling("1", "{'a': n.x, 'b': n.x}") + "{{ n.x }}",
    doubling("3", "n.x * n.x"),
    "{% set n = namespace(x=()) %}{% for i in range(99999) %}{% set n.x = (n.x,) %}{% endfor %}"
    "{{ n.x }}",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set y %}{{ n.x }}{{ n.x }}"
    "{% endset %}{% set n.x = y %}{% endfor %}",
    "{% set s = 'a' * 10**6 %}{{ ([s] * 9) | join }}",
    "{% set s = 'a' * 10**6 %}{{ s.join(['', ''] * 9) }}",
    "{% set s = 'a' * 10**6 %}{{ s.replace('a', 'bbbbbb') }}",
    "{% set s = 'a' * 10**6 %}{{ s | replace('a', 'bbbbbb') }}",
    "{% set s = 'a' * 10**6 %}{{ s.translate({97: 'bbbbbb'}) }}",
    "{% set s = 'a' * 10**6 %}{{ s ~ s ~ s ~ s ~ s }}",
    "{% set s = 'a' * 10**6 %}{{ s }}{{ s }}{{ s }}{{ s }}{{ s }}",
    "{% set s = 'a' * 10**6 %}{{ '%s%s%s%s%s' % (s, s, s, s, s) }}",
    "{% set s = 'a' * 10**6 %}{{ '%(s)s%(s)s%(s)s%(s)s%(s)s' % {'s': s} }}",
    "{% set s = 'a' * 10**6 %}{{ '{0}{0}{0}{0}{0}'.format(s) }}",
    "{{ 'a'.center(10**10) }}",
    "{{ 'a' | center(width=10**10) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 10**10) }}",
    "{{ '%2000000000d' % 1 }}",
    "{{ '%*d' % (2 * 10**9, 1) }}",
    "{{ '%2000000000d' | format(1) }}",
    "{{ ('\t' * 1000).expandtabs(10**9) }}",
    "{{ 'a\n' | indent(10**10) }}",
    "{{ [[1]] | tojson(indent=10**10) }}",
    "{{ [1] | batch(10**10, 0) | list }}",
    "{{ 1 | round(10**9, 'ceil') }}",
    "{{ (5).to_bytes(10**11, 'big') }}",
    "{{ ('ü' * 10**6).encode('punycode') }}",
    "{{ ([[1]] * 100000) | sum(start=[]) }}",
    "{% set s = 'a' * 10**7 %}{{ s.rfind('ab' ~ s[:9**6]) }}",
    "{{ ('a' * 99999999) | wordwrap(3) }}",
    "{% for i in range(99) %}" + "x" * 99999 + "{% endfor %}",
    "{% filter center(10**10) %}a{% endfilter %}",
    "x" * 300_000,
    "{{ " + "1+" * 50_000 + "1 }}",
]


@pytest.mark.parametrize("source", EXPLODING)
def test_an_exploding_template_is_stopped(source: str) -> None:
    assert reason(source) == "limit"


@pytest.mark.parametrize(
    ("source", "length"),
    [
        ("{{ dict.fromkeys(range(99999)) | length }}", 5),
        ("{% set n = namespace() %}{% set n.x = [n, n] %}{{ n }}", 57),
        ("{{ strftime_now('%1000000000Y') }}", 0),
        ("{{ strftime_now('%Y' * 9999) }}", 39_996),
        ("{% for i in range(200) %}{% set x = 'a' * 9999 ~ i %}{% endfor %}", 0),
    ],
)
def test_a_template_that_only_looks_dangerous_is_rendered(source: str, length: int) -> None:
    assert len(render(source)) == length


def test_memory_is_bounded_where_the_text_is_short() -> None:
    source = "{% set n = namespace(x=[]) %}" + "{% set n.x = n.x + ['a' * 10**7] %}" * 40 + "done"
    assert reason(source) == "limit"
    assert render(source.replace("10**7", "10**5")) == "done"


def test_a_long_conversation_may_give_a_long_prompt() -> None:
    long = "ü" * (6 << 20)
    assert render("{{ messages[0].content }}", [{"role": "user", "content": long}]) == long


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'].__mro__ }}",
        "{{ ('' | attr('__class__')).__mro__ }}",
        "{{ [''] | map(attribute='__class__.__mro__') | list }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
        "{{ raise_exception.__globals__['sys'] }}",
        "{{ strftime_now.__self__._environment }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ namespace.mro() }}",
        "{{ (messages | map('upper')).gi_frame.f_back }}",
        "{{ self._TemplateReference__context.vars }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update({'role': 'x'}) }}",
    ],
)
def test_reaching_out_of_the_sandbox_is_refused(source: str) -> None:
    assert reason(source) == "escape"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ ''.__class__ }}{{ ''['__class__'] }}{{ '' | attr('__class__') }}", ""),
        ("{{ [''] | map(attribute='__class__') | join }}", ""),
        ("{{ '{0.__class__}'.format('') }}{{ '{a.__class__}'.format_map({'a': 1}) }}", ""),
        (
            "{{ raise_exception.__globals__ }}{{ strftime_now.__self__ }}{{ raise_exception.func }}",
            "",
        ),
        ("{{ (messages | map('upper')).gi_frame }}{{ self._TemplateReference__context }}", ""),
        ("{% set n = namespace(__class__=1) %}{% set n._x = 2 %}{{ n.__class__ }}{{ n._x }}", ""),
    ],
)
def test_a_hidden_attribute_is_empty(source: str, text: str) -> None:
    assert render(source) == text


@pytest.mark.parametrize("source", ["{% include '/etc/hosts' %}", "{% import 'os' as os %}"])
def test_files_and_modules_are_out_of_reach(source: str) -> None:
    assert reason(source) == "broken"


def test_a_render_that_was_stopped_leaves_the_template_usable() -> None:
    times = template("{% if n %}{{ 'a' * n }}{% endif %}")
    with pytest.raises(TemplateError):
        times.render(TALK, options={"n": 10**10})
    assert times.render(TALK, options={"n": 3}) == "aaa"


MARKED = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"


def test_prolonging_cuts_right_behind_the_last_words() -> None:
    talk = [USER, {"role": "assistant", "content": "it is "}]
    assert template(MARKED).continue_final(talk) == "[user]hi[end][assistant]it is "


def test_prolonging_a_trimmed_message_leaves_no_blanks_behind() -> None:
    trimming = MARKED.replace("m.content", "m.content | trim")
    talk = [USER, {"role": "assistant", "content": "it is \n"}]
    assert template(trimming).continue_final(talk) == "[user]hi[end][assistant]it is"


def test_prolonging_what_the_template_leaves_out_is_refused() -> None:
    with pytest.raises(TemplateError, match="leaves out"):
        template("{{ messages[0].content }}").continue_final(TALK)
