"""Real coding agents (Codex, Claude Code, OpenCode, Qwen Code, aider) against `hadal serve` with a
scripted model, without a way out of this machine.

    python -m tests.clients.agents codex --version 0.171.0

    the caller        trial.run                installs the client, makes the namespaces, reads the result
    in the namespace  __main__ -> Relay        records requests and replies between the two
                              -> hadal serve   real, with the model of `scripted`
                              -> the client    real, one process for each turn
"""
