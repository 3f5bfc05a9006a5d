"""Schedules as values: the order of a layer's ops and of the exchanges that overlap with them."""
