"""Fields of one config.json, each refused by its name. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from localchat.errors import ModelInvalid


class ConfigFields:
    """`raw`: parsed JSON. `name`: of the file, for messages. `otherwise`: what to do where something cannot
    be run."""

    def __init__(self, raw: Mapping[str, Any], name: str, hint: str) -> None:
        self.raw, self.name, self.hint = raw, name, hint

    def unsupported(self, what: str) -> ModelInvalid:
        """The error for a config that asks for something that is not there."""
        return ModelInvalid(f"{self.name} asks for {what}.", hint=self.hint, path=self.name)

    def integer(self, field: str, default: int | None = None, most: int = 1 << 30) -> int:
        """A whole number above 0 and below `most`. Raises ModelInvalid."""
        found = self.raw.get(field)
        found = default if found is None else found
        if not isinstance(found, int) or isinstance(found, bool) or not 0 < found < most:
            raise self._invalid(field, found)
        return found

    def number(
        self,
        field: str,
        default: float,
        section_of: Mapping[str, Any] | None = None,
        above: float = 0.0,
    ) -> float:
        """A number `above` another one, of the config or of an object in it. Raises ModelInvalid."""
        found = (self.raw if section_of is None else section_of).get(field)
        found = default if found is None else found
        if (
            isinstance(found, bool)
            or not isinstance(found, int | float)
            or not above < found < 1e30
        ):
            raise self._invalid(field, found)
        return float(found)

    def section(self, field: str, section_of: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """An object; an empty one where there is none. Raises ModelInvalid."""
        found = (self.raw if section_of is None else section_of).get(field) or {}
        if not isinstance(found, dict):
            raise ModelInvalid(f"{self.name}: {field} is {found!r}, no object.")
        return found

    def numbers(self, field: str, count: int, section_of: Mapping[str, Any]) -> tuple[float, ...]:
        """A list of `count` numbers above 0. Raises ModelInvalid."""
        found = section_of.get(field)
        if not isinstance(found, list) or len(found) != count:
            raise ModelInvalid(f"{self.name}: {field} is no list of {count} numbers.")
        return tuple(self.number(field, 0.0, {field: each}) for each in found)

    def _invalid(self, field: str, found: object) -> ModelInvalid:
        said = "is missing" if found is None else f"is {found!r}, no usable number"
        return ModelInvalid(
            f"{self.name}: {field} {said}.",
            hint="The file may be damaged or of another model: download it again.",
        )
