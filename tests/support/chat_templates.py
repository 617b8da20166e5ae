"""Chat templates of tests, rendered in one helper process."""

from functools import partial

from localchat.chat_format import chat_format as _chat_format
from localchat.chat_format.render_process import RenderProcess

RENDER_PROCESS = RenderProcess()

chat_format = partial(_chat_format, process=RENDER_PROCESS)
