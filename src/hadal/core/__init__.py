"""What every other room speaks: configuration, the request's life, messages, seams, errors. Imports
nothing of ours.
"""
