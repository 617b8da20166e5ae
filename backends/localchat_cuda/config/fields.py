"""Typed access to the fields of a config.json; errors name the field. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from localchat.errors import ModelInvalid


class ConfigFields:
    """A parsed config.json."""

    def __init__(self, raw: Mapping[str, Any], name: str, hint: str) -> None:
        """`raw`: parsed JSON. `name`: of the file, for messages. `hint`: what to do if it is unsupported."""
        self.raw = raw
        self.name = name
        self.hint = hint

    def unsupported(self, what: str) -> ModelInvalid:
        """The error for a config that needs an unsupported feature."""
        return ModelInvalid(f"{self.name} asks for {what}.", hint=self.hint, path=self.name)

    def integer(
        self,
        field: str,
        default: int | None = None,
        most: int = 1 << 30,
        within: Mapping[str, Any] | None = None,
    ) -> int:
        """An integer above 0 and below `most`, of the config or an object `within` it. Raises ModelInvalid."""
        found = (self.raw if within is None else within).get(field)
        found = default if found is None else found
        if not isinstance(found, int) or isinstance(found, bool) or not 0 < found < most:
            raise self._invalid(field, found)
        return found

    def number(
        self,
        field: str,
        default: float,
        within: Mapping[str, Any] | None = None,
        above: float = 0.0,
    ) -> float:
        """A number larger than `above`, of the config or an object `within` it. Raises ModelInvalid."""
        found = (self.raw if within is None else within).get(field)
        found = default if found is None else found
        if (
            isinstance(found, bool)
            or not isinstance(found, int | float)
            or not above < found < 1e30
        ):
            raise self._invalid(field, found)
        return float(found)

    def section(self, field: str, within: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """An object; empty if there is none. Raises ModelInvalid."""
        found = (self.raw if within is None else within).get(field) or {}
        if not isinstance(found, dict):
            raise ModelInvalid(f"{self.name}: {field} is {found!r}, no object.")
        return found

    def numbers(self, field: str, count: int, within: Mapping[str, Any]) -> tuple[float, ...]:
        """A list of `count` numbers above 0. Raises ModelInvalid."""
        found = within.get(field)
        if not isinstance(found, list) or len(found) != count:
            raise ModelInvalid(f"{self.name}: {field} is no list of {count} numbers.")
        return tuple(self.number(field, 0.0, {field: each}) for each in found)

    def _invalid(self, field: str, found: object) -> ModelInvalid:
        problem = "is missing" if found is None else f"is {found!r}, no usable number"
        return ModelInvalid(
            f"{self.name}: {field} {problem}.",
            hint="The file may be damaged or of another model: download it again.",
        )
