"""The supervisor of a run: the main process of `hadal serve`, in parts."""
