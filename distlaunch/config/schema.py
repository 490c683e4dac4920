"""The JSON Schema of the config, for editors: completion, hover texts and checks while typing."""

from __future__ import annotations

import json
from typing import Any

from distlaunch.base.plain_types import is_dict, is_list
from distlaunch.config.run import RunConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"
FILE_NAME = "distlaunch.schema.json"
_VARIABLE = {"type": "string", "pattern": r"\$\{[A-Za-z_]", "description": "an environment variable: ${NAME:default}"}


def json_schema() -> dict[str, Any]:
    """Return the schema. Numbers and choices may also be written as `${NAME:default}`."""
    schema = _with_variables(RunConfig.model_json_schema())
    head = {
        "$schema": DIALECT,
        "title": "distlaunch config",
        "description": "One run of distlaunch. Unknown keys are errors.",
    }
    return head | {key: value for key, value in schema.items() if key not in head}


def schema_text() -> str:
    """Return the schema as the text of the file that ships with the configs."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def _with_variables(schema: Any, name: str = "") -> Any:
    if is_list(schema):
        return [_with_variables(part) for part in schema]
    if not is_dict(schema):
        return schema
    inner = {
        # values, not schemas: they contain no types
        key: value if key in ("default", "const", "enum") else _with_variables(value, key)
        for key, value in schema.items()
    }
    return (
        inner if name in ("kind", "discriminator", "mapping") or not _is_typed_scalar(schema) else _or_variable(inner)
    )


def _is_typed_scalar(schema: dict[str, Any]) -> bool:
    is_limited_text = schema.get("type") == "string" and ("enum" in schema or "pattern" in schema)
    return schema.get("type") in ("integer", "number", "boolean") or is_limited_text


def _or_variable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that also accepts a variable. Titles and defaults stay outside, where editors look for them."""
    outside = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    return {"anyOf": [{key: value for key, value in schema.items() if key not in outside}, dict(_VARIABLE)], **outside}
