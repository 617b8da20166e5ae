"""Themes: quiet colours, one accent, and a contrast of at least 4.5 to 1 for text."""

from collections.abc import Mapping
from typing import Final

from textual.theme import Theme

_DARK: Final = Theme(
    name="dark",
    primary="#8fb8de",
    secondary="#b5a4d9",
    accent="#e8b86d",
    warning="#e0af68",
    error="#e8837e",
    success="#93c58f",
    foreground="#d9dce3",
    background="#15171c",
    surface="#1b1e25",
    panel="#242832",
    dark=True,
    variables={
        "footer-key-foreground": "#e8b86d",
        "input-selection-background": "#8fb8de 35%",
        "block-cursor-text-style": "none",
        "border": "#3a4050",
        "text-disabled": "auto 54%",  # of placeholders; the default of 38 % is too pale
    },
)
_LIGHT: Final = Theme(
    name="light",
    primary="#245d93",
    secondary="#6a4fa3",
    accent="#854d00",
    warning="#7c5000",
    error="#b3261e",
    success="#25602b",
    foreground="#22252b",
    background="#fbfaf7",
    surface="#f2f0ea",
    panel="#e6e3db",
    dark=False,
    variables={
        "input-selection-background": "#245d93 25%",
        "block-cursor-text-style": "none",
        "border": "#c3beb2",
        "text-muted": "auto 68%",
        "text-disabled": "auto 60%",
        "panel-lighten-2": "#c3beb2",  # of scroll bars; computed, it is as light as the background
    },
)
_HIGH_CONTRAST: Final = Theme(
    name="high-contrast",
    primary="#ffffff",
    secondary="#8be9fd",
    accent="#ffff00",
    warning="#ffb000",
    error="#ff6b6b",
    success="#5cff5c",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#202020",
    dark=True,
    text_alpha=1.0,
    variables={
        "input-selection-background": "#ffff00 60%",
        "block-cursor-text-style": "bold",
        "border": "#ffffff",
        "text-muted": "#ffffff",
        "text-disabled": "#d0d0d0",
    },
)

THEMES: Final = (_DARK, _LIGHT, _HIGH_CONTRAST)
ANSI: Final = {"ansi": "ansi-dark", "ansi-light": "ansi-light"}
"""Our names for Textual's themes that use the terminal's own colours."""

NAMES: Final = (*(theme.name for theme in THEMES), *ANSI)


AUTO: Final = "auto"
"""The name of the theme that is light or dark as the terminal is."""
_LIGHT_COLORS: Final = ("7", *map(str, range(9, 16)))


def textual_name(name: str, *, is_light: bool = False) -> str:
    """Textual's name of a theme. `is_light`: whether the terminal has a light background."""
    if name == AUTO:
        return "light" if is_light else "dark"
    return ANSI.get(name, name)


def is_light_terminal(environ: Mapping[str, str]) -> bool:
    """Whether the environment says that the terminal is light: COLORFGBG ends with the number of the
    background, as in `0;15`."""
    return environ.get("COLORFGBG", "").rpartition(";")[2] in _LIGHT_COLORS
