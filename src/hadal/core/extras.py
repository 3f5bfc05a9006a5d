"""Extras of the package: third-party modules that only lab or apps need, and how to install them."""

from __future__ import annotations

from importlib.util import find_spec

EXTRA_TO_MODULES = {
    "apps": ("nicegui", "httpx_sse", "markdown_it", "pygments", "plotly"),
    "lab": ("pebble", "plotly"),
}
"""Extra -> modules that it installs; must match pyproject.toml."""


def missing_modules(extra: str) -> tuple[str, ...]:
    """Return the modules of an extra that are not installed."""
    return tuple(module for module in EXTRA_TO_MODULES[extra] if find_spec(module) is None)


def install_hint(module: str) -> str | None:
    """Return how to install a missing module, or None if no extra has it."""
    name = module.partition(".")[0]
    extras = [extra for extra, modules in EXTRA_TO_MODULES.items() if name in modules]
    if not extras:
        return None
    commands = " or ".join(f"pip install 'hadal[{extra}]'" for extra in extras)
    return f"{name} is not installed. It comes with an extra: {commands}."
