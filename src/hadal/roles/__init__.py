"""State machines without I/O: `handle(now_s, event) -> list[Effect]`. Hosts, live or simulated, do
the rest.
"""
