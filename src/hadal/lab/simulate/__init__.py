"""`hadal simulate`: stages of a day; its tables, pages and frames."""
