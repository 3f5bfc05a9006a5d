"""Expert parallelism's messages: dispatch tokens to the ranks of their experts, combine what comes
back.
"""
