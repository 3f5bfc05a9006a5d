"""Vocabulary of all packages: configuration, a request's life, messages, seams, errors. Imports
nothing else of Hadal.
"""
