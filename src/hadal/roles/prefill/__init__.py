"""Leader (scheduler) of a prefill unit: queued and started prompts, cached prefixes, and steps."""
