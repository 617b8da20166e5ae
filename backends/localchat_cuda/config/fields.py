"""Typed access to the fields of a config.json; errors name the field. Imports no torch."""

from collections.abc import Collection, Mapping
from typing import Any

from localchat.errors import ModelInvalid


class ConfigFields:
    """A parsed config.json."""

    def __init__(self, raw: Mapping[str, Any], name: str, hint: str) -> None:
        """`raw`: parsed JSON. `name`: of the file, for messages. `hint`: of errors for unsupported features."""
        self.raw = raw
        self.name = name
        self.hint = hint

    def unsupported(self, what: str) -> ModelInvalid:
        """Return the error for a config that needs an unsupported feature."""
        return ModelInvalid(f"{self.name} needs {what}.", hint=self.hint, path=self.name)

    def integer(
        self,
        field: str,
        default: int | None = None,
        within: Mapping[str, Any] | None = None,
        limit: int = 1 << 30,
    ) -> int:
        """Return an integer above 0 and below `limit`. Raises ModelInvalid.

        `within`: object of the config that has the field; None: the config itself."""
        value = self._value(field, default, within)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < limit:
            raise self._invalid(field, value)
        return value

    def number(
        self,
        field: str,
        default: float,
        within: Mapping[str, Any] | None = None,
        above: float = 0.0,
    ) -> float:
        """Return a number larger than `above`; `within` as for `integer`. Raises ModelInvalid."""
        value = self._value(field, default, within)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not above < value < 1e30:
            raise self._invalid(field, value)
        return float(value)

    def section(self, field: str, within: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Return an object, empty if the field is missing; `within` as for `integer`. Raises ModelInvalid."""
        value = self._value(field, None, within) or {}
        if not isinstance(value, dict):
            raise ModelInvalid(f"{self.name}: {field} is {value!r}, not an object.")
        return value

    def numbers(self, field: str, count: int, within: Mapping[str, Any]) -> tuple[float, ...]:
        """Return a list of `count` numbers above 0. Raises ModelInvalid."""
        numbers = within.get(field)
        if not isinstance(numbers, list) or len(numbers) != count:
            raise ModelInvalid(f"{self.name}: {field} is not a list of {count} numbers.")
        return tuple(self.number(field, 0.0, {field: number}) for number in numbers)

    def kinds_of_layers(
        self, field: str, layers: int, supported: Collection[str]
    ) -> tuple[str, ...] | None:
        """Return the kind of each layer; None if the field is missing. Raises ModelInvalid."""
        kinds = self.raw.get(field)
        if kinds is None:
            return None
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ModelInvalid(f"{self.name}: {field} is not a list of {layers} kinds.")
        for kind in kinds:
            if kind not in supported:
                raise self.unsupported(f"layers of kind {kind}")
        return tuple(kinds)

    def check_columns(self, columns: int, what: str, supported: Collection[int]) -> None:
        """Raise ModelInvalid unless a number of columns is supported."""
        if columns not in supported:
            listed = ", ".join(map(str, supported))
            raise self.unsupported(f"{what} of {columns} columns (supported: {listed})")

    def _value(self, field: str, default: float | None, within: Mapping[str, Any] | None) -> Any:  # noqa: ANN401 (parsed JSON)
        if within is None:
            within = self.raw
        value = within.get(field)
        return default if value is None else value

    def _invalid(self, field: str, value: object) -> ModelInvalid:
        problem = f"is {value!r}, not a usable number"
        if value is None:
            problem = "is missing"
        return ModelInvalid(
            f"{self.name}: {field} {problem}.",
            hint="The file may be damaged or of another model: download it again.",
        )
