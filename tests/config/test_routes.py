"""The `[routes]` section: what it says, and what is wrong with it."""

from pathlib import Path

import pytest

from localchat.config.routes import find_route
from localchat.config.settings_file import read_settings
from localchat.errors import UsageError

GOOD = '[routes.easy]\nsmall = "a"\nlarge = "b"\ndoubt = -1\ncode = true\n'


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return path


def test_a_route_is_read_with_its_rules(tmp_path: Path) -> None:
    routes = read_settings(written(tmp_path, GOOD)).routes
    route = find_route("route:easy", routes)
    assert (route.small, route.large, route.doubt, route.code) == ("a", "b", -1, True)
    with pytest.raises(UsageError, match="no route 'other'") as caught:
        find_route("route:other", routes)
    assert "easy" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("routes = 1\n", "not a section"),
        ('[routes.x]\nsmall = "a"\n', "no large model"),
        ('[routes.x]\nsmall = "a"\nlarge = "b"\n', "never goes to the large"),
        ('[routes.x]\nsmall = "a"\nlarge = "b"\ncode = 1\n', "true or false"),
        ('[routes.x]\nsmall = "a"\nlarge = "b"\ndoubt = true\n', "a number"),
        ('[routes.x]\nsmall = "a"\nlarge = "b"\nregex = "("\n', "not a valid regular expression"),
        ('[routes.x]\nsmall = "a"\nlarge = "route:x"\ncode = true\n', "is a route"),
        ('[routes.x]\nsmal = "a"\n', "there is no 'smal'"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_settings(written(tmp_path, text))
