"""An OpenAPI description of the paths of this server, made of the request types in the openai client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from openai.types import batch_create_params, completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import TypeAdapter

_BODIES: dict[str, Any] = {
    "/completions": completion_create_params.CompletionCreateParams,
    "/chat/completions": chat_create_params.CompletionCreateParams,
    "/responses": response_create_params.ResponseCreateParams,
    "/batches": batch_create_params.BatchCreateParams,
}
_READ = (
    "/models",
    "/models/{id}",
    "/files",
    "/files/{id}",
    "/files/{id}/content",
    "/batches",
    "/batches/{id}",
)


def write_schemas(path: Path) -> None:
    """Write the description as JSON."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    answers = {"default": {"description": "an answer"}}
    for url, kind in _BODIES.items():
        schema = TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        content = {"application/json": {"schema": schema}}
        paths[url] = {"post": {"requestBody": {"required": True, "content": content}, "responses": answers}}
    for url in _READ:
        id_of = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        parameters = [id_of] if "{id}" in url else []
        paths.setdefault(url, {})["get"] = {"parameters": parameters, "responses": answers}
    info = {"title": "openai client", "version": "1"}
    document = {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}
    path.write_text(json.dumps(document))
