"""The config models as a JSON schema and as a Markdown reference, so that both follow the models."""

import json
from collections.abc import Iterator
from typing import Any

from llmppo.config import ExperimentConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> str:
    """JSON schema (draft 2020-12) of experiment files."""
    schema = {"$schema": DIALECT, **ExperimentConfig.model_json_schema()}
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


def _type_name(schema: dict[str, Any]) -> str:
    """A short name of what a key accepts."""
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "anyOf" in schema:
        return " or ".join(_type_name(option) for option in schema["anyOf"])
    if "oneOf" in schema or "$ref" in schema:
        return "section"
    kind = schema.get("type", "any")
    if kind == "array" and "items" in schema:
        return f"list of {_type_name(schema['items'])}"
    bounds = [
        f"{sign} {schema[key]:g}"
        for key, sign in (
            ("minimum", "≥"),
            ("exclusiveMinimum", ">"),
            ("maximum", "≤"),
            ("exclusiveMaximum", "<"),
        )
        if key in schema
    ]
    return " ".join([kind, ", ".join(bounds)]).strip()


def _references(schema: dict[str, Any]) -> Iterator[str]:
    """Names of the sections that a key holds."""
    if "$ref" in schema:
        yield schema["$ref"].rpartition("/")[2]
    for option in [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]:
        yield from _references(option)


def _meaning(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """A key's own description, else that of the section it holds."""
    sections = [definitions[reference] for reference in _references(schema)]
    if "description" in schema or not sections:
        return schema.get("description", "")
    if len(sections) > 1:
        return "One of several kinds, each with keys of its own."
    return sections[0].get("description", "").partition("\n")[0]


def _table(section: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    yield "| key | accepts | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for name, schema in section["properties"].items():
        required = name in section.get("required", ())
        compound = next(_references(schema), None) is not None
        default = (
            "required" if required else "below" if compound else f"`{json.dumps(schema.get('default'))}`"
        )
        cells = (f"`{name}`", _type_name(schema), default, _meaning(schema, definitions))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _sections(
    section: dict[str, Any], definitions: dict[str, Any], path: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each section with its dotted path, parents first; a section of several kinds comes once for each."""
    for name, schema in section["properties"].items():
        for reference in _references(schema):
            found = definitions[reference]
            kind = found["properties"].get("kind", {}).get("const")
            where = f"{path}{name}"
            yield (f"{where}` with `kind: {kind}" if kind else where), found
            yield from _sections(found, definitions, f"{where}.")


def key_reference() -> str:
    """Markdown tables of every key: what it accepts, its default, its meaning."""
    schema = ExperimentConfig.model_json_schema()
    definitions = schema["$defs"]
    lines = ["### Top level", "", *_table(schema, definitions), ""]
    seen: dict[str, str] = {}
    for path, section in _sections(schema, definitions, ""):
        text = section.get("description", "").partition("\n")[0]
        lines += [f"### `{path}`", "", text, ""]
        title = section["title"]
        if title in seen:
            lines += [f"Keys as in `{seen[title]}`.", ""]
            continue
        seen[title] = path
        lines += [*_table(section, definitions), ""]
    return "\n".join(lines)
