"""One server a module: tests of the same file share it."""

from collections.abc import Iterator

import pytest

from tests.support.http_server import Stage, serving


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with serving() as running:
        yield running
