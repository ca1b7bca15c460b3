"""Compile chat templates as transformers does: jinja2 in a sandbox, with generation marks.

A template is somebody else's program: it is compiled and called with limits on processor time and
memory (runtime/bounds.py), and any exception in it becomes a DataError that names the template.
"""

import json
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from data.chat.keys import Reads
from runtime.bounds import UnboundedError, bounded
from runtime.errors import DataError

if TYPE_CHECKING:
    from jinja2 import Environment, Template

MAX_SOURCE = 1 << 21
"""Maximum number of characters of a template's source."""
MARKS: ContextVar[tuple[str, str]] = ContextVar("marks", default=("", ""))
"""Texts to write before and after the assistant's words in the current rendering."""


@cache
def compiled(name: str, source: str) -> "Template":
    """Compile a template. Raises DataError if it is not valid or too long."""
    if len(source) > MAX_SOURCE:
        raise DataError(
            f"the chat template {name} has more than {MAX_SOURCE:,} characters; give another file"
        )
    try:
        return bounded(f"the chat template {name}", lambda: _environment().from_string(source))
    except UnboundedError:
        raise
    # Any exception is possible: jinja2 evaluates constants, and Python compiles its output.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"the chat template {name} is not valid jinja2 ({reason}); repair the template"
        ) from error


@cache
def names_in(name: str, source: str) -> Reads:
    """Return the names that a template uses; the template must have been compiled before."""
    from jinja2 import meta, nodes

    def names() -> Reads:
        tree = _environment().parse(source)
        constants = [node.value for node in tree.find_all(nodes.Const)]
        texts = frozenset(value for value in constants if isinstance(value, str))
        attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
        return Reads(
            variables=frozenset(meta.find_undeclared_variables(tree)),
            names=texts | attributes,
            texts=texts,
        )

    return bounded(f"the chat template {name}", names)


@cache
def _environment() -> "Environment":
    """Return a jinja2 environment with the sandbox, loop controls and generation marks.

    It behaves like the environment in chat_template_utils.py of the transformers library.
    """
    from jinja2 import TemplateError, Undefined, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012, jinja2's own

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            begin, end = MARKS.get()
            return f"{begin}{caller()}{end}"

    class Unnamed(Undefined):
        def __str__(self) -> str:
            name = self._undefined_name or ""
            if name.endswith("_token"):
                raise TemplateError(
                    f"it uses {name}, which tokenizer_config.json does not define; add it there"
                )
            return ""

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
        undefined=Unnamed,
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
