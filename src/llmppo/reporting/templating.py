"""Jinja templates that ship with the package."""

from typing import Any


def render(template: str, **values: Any) -> str:
    """Fill a template of `reporting/templates`; HTML is escaped, an undefined name raises."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("llmppo.reporting"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=False,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)
