"""The disk cache: segments of blocks, their owners, and reads and writes in parallel to steps."""
