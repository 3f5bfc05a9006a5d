"""Ranks of a unit: who lives, how they form anew, and what each rank does of a step.

The leader of a unit above it knows ranks by number alone; messages to and from them are made here.
"""
