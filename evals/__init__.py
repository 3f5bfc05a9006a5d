"""Tasks with checkable answers, and a served model's scores on them."""
