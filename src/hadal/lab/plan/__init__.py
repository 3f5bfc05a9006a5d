"""`hadal plan`: its run, files and tables."""
