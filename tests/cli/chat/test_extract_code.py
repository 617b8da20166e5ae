"""The first fenced code block of a text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localchat.cli.chat.one_shot import first_code_block


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("no code", None),
        ("`inline` only", None),
        ("```\na\n```", "a\n"),
        ("x\n```py title\na\n\nb\n```\nrest\n```\nc\n```", "a\n\nb\n"),
        ("~~~\n```\n~~~\n", "```\n"),
        ("````\n```\na\n```\n````\n", "```\na\n```\n"),
        ("  ```\n  a\n    b\n  ```\n", "a\n  b\n"),
        ("    ```\n    a\n    ```\n", None),
        ("```\nnever closed", "never closed"),
        ("```\n```", ""),
        ("``` not`a fence\nx", None),
        ("```\r\na\r\n```\r\n", "a\r\n"),
    ],
)
def test_the_block_without_its_fences(text: str, code: str | None) -> None:
    assert first_code_block(text) == code


@given(st.text(alphabet="ab`~ \n"), st.integers(0, 40))
def test_a_block_found_in_the_beginning_is_the_block_of_the_whole(text: str, cut: int) -> None:
    early = first_code_block(text[:cut], finished=False)
    assert early is None or early == first_code_block(text)
