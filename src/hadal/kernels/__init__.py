"""Fast C++ ops on a CPU, and their build. Most have a slow twin of their name in
`hadal.reference`.
"""
