"""Types of NumPy arrays by element type. The suffix of a name gives the shape (`counts_LE`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
"""Whole numbers: counts, ids, positions."""
Floats = NDArray[np.float64]
"""Real numbers: seconds, loads, shares."""
Bools = NDArray[np.bool_]
"""One truth value per element."""
