"""Renders chat templates in a worker process (`worker_main`): code from a checkpoint runs here."""

import json
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MEMORY_LIMIT = 1 << 30  # bytes of address space


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training. Here it just renders its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class PublicNamespace(Namespace):
    """`namespace()` that rejects names with a leading underscore, through which a template could reach Python."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace has no attribute {name!r}; rename it")
        super().__setitem__(name, value)


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
    """Plain JSON; jinja2's own filter escapes for HTML. What `map` and `select` return is a list, as in llama.cpp."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, default=_listed, **options)


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, Iterator):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return list(value)


@lru_cache(maxsize=32)
def compiled(source: str) -> Template:
    """Compile a template in the same environment as transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals = {
        "range": environment.globals["range"],
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
        "namespace": PublicNamespace,
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
    }
    return environment.from_string(source)


def answer(template: str, context: dict[str, Any], max_characters: int) -> dict[str, str]:
    """Render a template: {"text": ...} or {"error": ...}."""
    try:
        text = compiled(template).render(context)
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:1000]}
    except (MemoryError, RecursionError) as error:
        return {"error": f"{type(error).__name__}: it needs too much memory or depth"}
    if len(text) > max_characters:
        return {"error": f"it makes {len(text)} characters; at most {max_characters} are allowed"}
    return {"text": text}
