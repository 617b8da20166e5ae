"""ChatFormat, the base of the formats with and without a template."""

from abc import ABC, abstractmethod

from localchat.chat_format.answer_parser import make_answer_parser, make_reasoning_parser
from localchat.chat_format.harmony_parser import ChannelParser
from localchat.chat_format.parser import ChoiceParser, Rendered
from localchat.chat_format.reasoning_parser import ReasoningFamily, ReasoningParser
from localchat.chat_format.tool_calls.family import ToolCallFamily
from localchat.engine.request import Messages


class ChatFormat(ABC):
    """Format of one model's conversations. Thread-safe."""

    markup: tuple[str, ...]
    """Texts whose control tokens the detokenizer must print, so that the parser sees them."""
    reasoning_family: ReasoningFamily
    """Tags of the model's reasoning."""
    warning = ""
    """Problem that affects every answer of this model, or an empty string."""

    @property
    @abstractmethod
    def tool_call_family(self) -> ToolCallFamily:
        """Syntax of the model's tool calls. If tools are offered, its tags are markup too."""

    @abstractmethod
    def render(self, messages: Messages) -> Rendered:
        """Return the prompt. Raises TemplateError if the template refuses, fails, or takes over 2 s."""

    def answer_parser(self, rendered: Rendered) -> ChoiceParser:
        """Return a parser for one choice of the answer to `rendered`: its reasoning, text and tool calls."""
        return make_answer_parser(
            self.reasoning_family,
            self.tool_call_family,
            rendered.tools,
            opened=rendered.opens_reasoning,
        )

    def reasoning_tracker(self, rendered: Rendered) -> ReasoningParser | ChannelParser:
        """Return a parser that only tracks whether the answer is inside reasoning."""
        return make_reasoning_parser(
            self.reasoning_family,
            self.tool_call_family,
            rendered.tools,
            opened=rendered.opens_reasoning,
        )
