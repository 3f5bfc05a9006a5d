"""`hadal plan`: its files and tables."""
