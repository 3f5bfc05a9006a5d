"""The slow, plain torch twin of every kernel. Same names and signatures; read these to know what a
kernel means.
"""
