"""Messages of expert parallelism: dispatch tokens to the ranks of their experts, and combine the
returned rows.
"""
