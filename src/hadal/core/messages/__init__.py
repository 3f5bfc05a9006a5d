"""Messages between processes, a file for each conversation; `every` has the union of all of them."""
