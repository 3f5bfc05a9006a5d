"""Where replicas of experts sit: placements from loads, and small steps towards a better one.

Knows nothing of ranks that live or die, of messages or of time; `roles/experts` asks it.
"""
