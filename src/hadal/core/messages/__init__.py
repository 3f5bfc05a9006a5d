"""Messages between processes, one file per conversation; `every` has the union of all of them."""
