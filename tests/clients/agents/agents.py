"""Agents: how each is installed, set up, and started for one turn.

A user sets `lines`. {url} is the server's URL without /v1; the model is named `hadal`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

CACHE = Path(
    os.environ.get("HADAL_CLIENTS")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hadal" / "clients"
)
"""Folder of installed clients, outside of the repository."""


@dataclass(frozen=True)
class Agent:
    """One agent. Its program is started in the work folder, with a home folder of its own."""

    name: str
    title: str
    package: str
    """Name on npm, or on PyPI if `is_python`."""
    version: str
    """Version that `make test-more` runs."""
    program: str
    """Program in the folder of installed programs."""
    api: str
    """Endpoint that it calls."""
    file: str
    """File in the home folder with `lines`; "": `lines` are environment variables."""
    lines: tuple[str, ...]
    turn: tuple[str, ...]
    """Arguments of a turn; {prompt} is the user's text."""
    again: tuple[str, ...]
    """Arguments of a turn that goes on with the last conversation."""
    environment: tuple[str, ...] = ()
    """Further environment variables, NAME=VALUE, that only a test needs."""
    model: str = "hadal"
    """Name of the served model. Codex chooses its tools by it."""
    is_python: bool = False
    is_parallel: bool = True
    """Its requests allow several calls in a turn."""
    not_served: str = "nothing is known"
    """Parts of its requests that the server does not serve."""

    def setting(self, url: str) -> str:
        """Return the lines for a server."""
        return "\n".join(self.lines).replace("{url}", url).replace("{model}", self.model) + "\n"


CODEX = Agent(
    "codex",
    "Codex CLI",
    "@openai/codex",
    "0.171.0",
    "codex",
    "/v1/responses",
    ".codex/config.toml",
    (
        'model = "{model}"',
        'model_provider = "hadal"',
        'model_providers.hadal = { name = "Hadal", base_url = "{url}/v1", wire_api = "responses" }',
    ),
    ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "{prompt}"),
    (
        *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        *("resume", "--last", "{prompt}"),
    ),
    not_served="the tool `web_search`, which only a provider can run; it is left out of the prompt",
)
CODEX_PATCHING = replace(CODEX, name="codex-gpt-5.5", title="Codex CLI as gpt-5.5", model="gpt-5.5")
"""Offered a custom tool `apply_patch`, and `tool_search`."""
CODEX_NESTED = replace(
    CODEX,
    name="codex-gpt-6.2-sol",
    title="Codex CLI as gpt-6.2-sol",
    model="gpt-6.2-sol",
    is_parallel=False,
)
"""Tools come in an item of the input, in namespaces."""
CLAUDE = Agent(
    "claude",
    "Claude Code",
    "@anthropic-ai/claude-code",
    "2.1.332",
    "claude",
    "/v1/messages",
    "",
    ("ANTHROPIC_BASE_URL={url}", "ANTHROPIC_AUTH_TOKEN=none", "ANTHROPIC_MODEL={model}"),
    ("-p", "--allowedTools=Bash,Edit,Read,Write", "{prompt}"),
    ("-p", "--continue", "--allowedTools=Bash,Edit,Read,Write", "{prompt}"),
    not_served="the tool `WebSearch`",
)
OPENCODE = Agent(
    "opencode",
    "OpenCode",
    "opencode-ai",
    "1.18.33",
    "opencode",
    "/v1/chat/completions",
    ".config/opencode/opencode.json",
    (
        '{"model": "hadal/hadal", "provider": {"hadal": {',
        '  "npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "{url}/v1", "apiKey": "none"},',
        '  "models": {"hadal": {"limit": {"context": 200000, "output": 32000}}}}}}',
    ),
    ("run", "--auto", "{prompt}"),
    ("run", "--auto", "--continue", "{prompt}"),
)
QWEN = Agent(
    "qwen",
    "Qwen Code",
    "@qwen-code/qwen-code",
    "0.24.4",
    "qwen",
    "/v1/chat/completions",
    "",
    ("OPENAI_BASE_URL={url}/v1", "OPENAI_API_KEY=none", "OPENAI_MODEL={model}"),
    ("--yolo", "--auth-type", "openai", "{prompt}"),
    ("--yolo", "--auth-type", "openai", "--continue", "{prompt}"),
)
AIDER = Agent(
    "aider",
    "aider",
    "aider-chat",
    "0.86.2",
    "aider",
    "/v1/chat/completions",
    "",
    ("OPENAI_API_BASE={url}/v1", "OPENAI_API_KEY=none", "AIDER_MODEL=openai/{model}"),
    ("--no-git", "--yes-always", "--edit-format=diff", "notes.txt", "--message", "{prompt}"),
    (
        *("--no-git", "--yes-always", "--edit-format=diff", "--restore-chat-history"),
        *("notes.txt", "--message", "{prompt}"),
    ),
    ("AIDER_CHECK_UPDATE=false", "AIDER_ANALYTICS_DISABLE=true", "AIDER_SHOW_MODEL_WARNINGS=false"),
    is_python=True,
    not_served="nothing is known. aider has no tools: its edits are text",
)
AGENTS = {
    agent.name: agent
    for agent in (CODEX, CODEX_PATCHING, CODEX_NESTED, CLAUDE, OPENCODE, QWEN, AIDER)
}
"""Name -> agent."""
