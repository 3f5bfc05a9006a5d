"""Planner: finds the cheapest deployment for a traffic, and tests it in a simulated world."""
