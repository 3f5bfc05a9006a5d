"""The disk cache: segments of blocks, their owners, and reads and writes beside the steps."""
