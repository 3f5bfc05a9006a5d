"""The fleet role: demand, the table of units, and what is started, drained and replaced.

Knows no process and no host; `runtime/fleet` runs it.
"""
