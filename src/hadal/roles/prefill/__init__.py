"""The leader of a prefill unit: prompts that wait or run, what caches have of them, and steps."""
