"""Result files of commands: reading them, charts, and pages."""
