"""The planner: traffic in, the cheapest deployment out, tried in a simulated world."""
