"""Types of NumPy arrays, by what their elements are. A name's suffix says the shape (`counts_LE`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
"""Whole numbers: counts, ids, positions."""
Floats = NDArray[np.float64]
"""Real numbers: seconds, loads, shares."""
Bools = NDArray[np.bool_]
"""Yes or no of each element."""
