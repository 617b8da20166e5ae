"""Settings that a tuning wrote, and what stood in their place, so that it can be taken back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec

from localchat.config.settings import Given, convert
from localchat.config.settings_file import read_settings, write_setting
from localchat.state_file import StateFile

_FILE: Final = "tuned.json"
_PATIENCE_S: Final = 10.0


class TunedSetting(msgspec.Struct, frozen=True):
    """One setting of one model."""

    key: str
    written: str
    before: str | None
    """None: the section of the model had none."""


class _TunedFile(msgspec.Struct, frozen=True):
    version: Literal[1] = 1
    models: dict[str, tuple[TunedSetting, ...]] = {}


class TunedSettings:
    """Writes settings of a model, and takes them back."""

    def __init__(self, settings_file: Path, state_dir: Path) -> None:
        self._settings_file = settings_file
        self._record = StateFile(state_dir / _FILE, _TunedFile, _TunedFile())

    def write(self, model: str, settings: Mapping[str, str]) -> None:
        """Write settings for a model. Raises UsageError, LocalchatError, OSError.

        What an earlier tuning wrote and this one leaves alone can still be taken back."""
        section = read_settings(self._settings_file).models.get(model, {})
        earlier = {one.key: one for one in self._record.read().models.get(model, ())}
        made = dict(earlier)
        for key, text in settings.items():
            before = _text(section[key]) if key in section else None
            known = earlier.get(key)
            if known is not None and before == known.written:
                before = known.before
            made[key] = TunedSetting(key, text, before)
        self._keep(model, tuple(made.values()))
        for key, text in settings.items():
            write_setting(self._settings_file, key, text, model)

    def undo(self, model: str) -> tuple[list[TunedSetting], list[TunedSetting]]:
        """Put back what stood there before. Returns what was taken back, and what was left because it has
        been changed since. Raises UsageError, LocalchatError, OSError."""
        section = read_settings(self._settings_file).models.get(model, {})
        back = []
        left = []
        for one in self._record.read().models.get(model, ()):
            if section.get(one.key) != convert(one.key, Given(one.written, one.key)):
                left.append(one)
                continue
            write_setting(self._settings_file, one.key, one.before, model)
            back.append(one)
        self._keep(model, ())
        return back, left

    def _keep(self, model: str, settings: tuple[TunedSetting, ...]) -> None:
        def changed(file: _TunedFile) -> _TunedFile:
            models = {name: held for name, held in file.models.items() if name != model}
            return _TunedFile(models={**models, model: settings} if settings else models)

        self._record.update(changed, _PATIENCE_S)


def _text(value: object) -> str:
    """A value of the settings file as a flag would give it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
