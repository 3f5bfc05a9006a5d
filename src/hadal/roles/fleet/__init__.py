"""Fleet role: demand, the table of units, and the units to start, drain and replace.

Independent of processes and hosts; `runtime/fleet` runs it.
"""
