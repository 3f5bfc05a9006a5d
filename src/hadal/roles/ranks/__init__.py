"""Ranks of a unit: their membership, new formations after a loss, and each rank's part of a step.

The unit's inner leader (prefill or decode) refers to ranks by number; this package exchanges
messages with them.
"""
