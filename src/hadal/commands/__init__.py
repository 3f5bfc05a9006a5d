"""Commands of more than one call, a file each, which `hadal.cli` loads on use."""
