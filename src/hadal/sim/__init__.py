"""The world that the roles run in when nothing is real: demand, priced engines, faults. Pure, from a seed."""
