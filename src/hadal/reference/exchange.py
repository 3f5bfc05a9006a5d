"""Reference definition of dispatch and combine, for the tokens of all ranks in one process.

Independent of bytes and placements. The slow twin of `comm/expert_comm`: the same rows reach the
same experts and are summed in the same order. The caller passes functions with the effect of the
dispatch and combine formats on a row. Shapes: T tokens of a rank, D hidden, K chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Rows = Callable[[Tensor], Tensor]


def exact(rows_ND: Tensor) -> Tensor:
    """Return rows unchanged: dispatch in FP32."""
    return rows_ND


def all_to_all(
    x_TD: Mapping[int, Tensor],
    ids_TK: Mapping[int, Tensor],
    weights_TK: Mapping[int, Tensor],
    experts: Callable[[int, Tensor], Tensor],
    there: Rows = exact,
    back: Rows = exact,
) -> dict[int, Tensor]:
    """Return rank -> routed [T, D]: the sum over k, by ascending expert id, of weight *
    back(expert(there(x))). `experts(e, x_ND)` returns expert e's output for rows, each independent
    of the others.
    """
    routed = {}
    for rank, x in x_TD.items():
        order_TK = ids_TK[rank].argsort(dim=1, stable=True)
        ids, weights = ids_TK[rank].gather(1, order_TK), weights_TK[rank].gather(1, order_TK)
        total_TD = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for token in range(len(x)):
            for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
                row_1D = back(experts(expert, there(x[token : token + 1])))
                # Round to FP32 after every addition, but not after the product.
                total_TD[token] = (
                    (total_TD[token] + weight.double() * row_1D[0].double()).float().double()
                )
        routed[rank] = total_TD.float()
    return routed
