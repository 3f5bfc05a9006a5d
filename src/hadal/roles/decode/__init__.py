"""The leader of a decode unit: what runs in which slot, the table of its ranks, and their steps."""
