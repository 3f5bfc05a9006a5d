"""Leader (scheduler) of a decode unit: requests in slots, the table of its ranks, and its steps."""
