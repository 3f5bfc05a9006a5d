"""Ranks of a unit: their membership, new formations after a loss, and each rank's part of a step.

The unit's inner leader knows ranks only by number. This package exchanges messages with them.
"""
