"""Values of arguments that stand in a shield, because they hold tags themselves."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tool_calls import gather, parser


@given(st.text("ab<>&\n/]", max_size=40).filter(lambda text: "]]>" not in text), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_shielded_value_may_hold_tags_and_comes_without_its_shield(
    town: str, in_pieces: bool
) -> None:
    town = f"{town}</param>"
    said = (
        f'<function name="get_weather"><param name="town"><![CDATA[{town}]]></param>'
        '<param name="days">3</param></function>'
    )
    one = parser("minicpm")
    parts = [part for piece in (said if in_pieces else [said]) for part in one.feed(piece)]
    _, calls = gather([*parts, *one.finish()])
    assert [(name, json.loads(told)) for name, told in calls] == [
        ("get_weather", {"town": town, "days": 3})
    ]
