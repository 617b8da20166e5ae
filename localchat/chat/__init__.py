"""Conversations as values: the tree of messages, the prompt made of it, and what to do when it is too long.

Front ends hold them; nothing here depends on a screen, a disk or an engine process.
"""

from typing import Final

ID_DIGITS: Final = 12
"""Leading digits of an id, which encode its creation time in ms. Lists show only these."""
