"""Keys of a text field in the order in which they are typed.

Private Textual API: `Widget._bindings`, `Widget._on_key`.
"""

from textual import events
from textual.widget import Widget


async def run_own_key(widget: Widget, event: events.Key) -> None:
    """Run a key of a text field, such as Backspace, before the keys after it.

    Textual runs it once it has passed all parents. On a slow connection or a busy machine, several keys arrive
    together, and later letters would be written first.
    """
    for binding in widget._bindings.key_to_bindings.get(event.key, ()):
        if not binding.priority and await widget.app.run_action(binding.action, widget):
            event.stop()
            event.prevent_default()
            return
