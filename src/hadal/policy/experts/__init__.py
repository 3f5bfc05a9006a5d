"""Placement of expert replicas: placements from loads, and small steps towards a better one.

Independent of rank failures, messages and time; `roles/experts` calls this package.
"""
