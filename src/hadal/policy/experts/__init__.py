"""Where replicas of experts sit: placements from loads, small steps towards a better one, reports.

Knows nothing of ranks that live or die, of messages or of time; `roles/experts` asks it.
"""
