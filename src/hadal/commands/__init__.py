"""Commands of `hadal.cli`, a file each, loaded when used."""
