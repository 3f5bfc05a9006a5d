"""The disk cache: segments of blocks, who owns them, reads and writes beside the steps."""
