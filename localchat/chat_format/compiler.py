"""The compiler of chat templates: jinja2's, with calls of the meter in what it writes.

One call at the head of every body (loop, branch, macro, block), one around every comparison,
literal container, concatenation and slice; operators, calls, items, filters and tests pass through
hooks that the sandbox has anyway. The compiled code finds all of them in `environment`
(sandbox.py).
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser

from localchat.chat_format.meter import Value

if TYPE_CHECKING:
    from localchat.chat_format.sandbox import Sandbox


class MeteredCode(CodeGenerator):
    """Writes Python in which every body and operation passes through the environment."""

    environment: "Sandbox"

    def visit(self, node: nodes.Node, *args: Value, **kwargs: Value) -> Value:
        self.environment.meter.tick()
        return super().visit(node, *args, **kwargs)

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.meter.tick()")
        super().blockvisit(nodes, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("environment.passed(")
        super().visit_Compare(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "store":
            super().visit_Tuple(node, frame)
        else:
            self._container(node.items, lambda: CodeGenerator.visit_Tuple(self, node, frame))

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._container(node.items, lambda: CodeGenerator.visit_List(self, node, frame))

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        parts = [part for pair in node.items for part in (pair.key, pair.value)]
        self._container(parts, lambda: CodeGenerator.visit_Dict(self, node, frame))

    def _container(self, parts: list[nodes.Expr], write: Callable[[], None]) -> None:
        # What is written out in the source is bounded by the source.
        if all(isinstance(part, nodes.Const) for part in parts):
            write()
            return
        self.write("environment.made(")
        write()
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        if frame.eval_ctx.volatile:
            join = "(markup_join if context.eval_ctx.volatile else str_join)"
        else:
            join = "markup_join" if frame.eval_ctx.autoescape else "str_join"
        self.write(f"environment.concatenated({join}, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.sliced(")
        self.visit(node.node, frame)
        for bound in (node.arg.start, node.arg.stop, node.arg.step):
            self.write(", ")
            if bound is None:
                self.write("None")
            else:
                self.visit(bound, frame)
        self.write(")")


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's own words for training. Here it
    only renders its body, in a scope of its own as transformers has it."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("render_body"), [], [], body)
        return block.set_lineno(line)

    def render_body(self, caller: Callable[[], str]) -> str:
        """The body's text."""
        return caller()
