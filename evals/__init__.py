"""Tasks with checkable answers, and how well a served model does on them."""
