"""Chat templates of tests, rendered in one helper process."""

from functools import partial

from localchat.chat_format import chat_format as _chat_format
from localchat.chat_format.reasoning_parser import ReasoningFamily
from localchat.chat_format.render_process import RenderProcess

RENDER_PROCESS = RenderProcess()

chat_format = partial(_chat_format, process=RENDER_PROCESS)


def reasoning_template(family: ReasoningFamily, *, is_open: bool) -> str:
    """A template by which this family is known. `is_open`: the prompt ends inside reasoning."""
    sign = family.signs[0].replace("'", "\\'")
    said = f"{{% if x %}}{{{{ '{sign}' }}}}{{% endif %}}" if "{" not in sign else sign
    tags = f"{{# {family.signs[0]} {' '.join(family.opens)} #}}"
    opened = f"{{{{ '{family.opens[0]}' }}}}" if is_open else ""
    return f"{tags}{said}[{{{{ messages[0].content }}}}]{opened}"
