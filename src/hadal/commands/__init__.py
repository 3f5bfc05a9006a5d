"""Commands that are more than a call: each a file, which `hadal.cli` loads when it is asked for."""
