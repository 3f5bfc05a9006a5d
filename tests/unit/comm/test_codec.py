"""Rows encoded and decoded in each dispatch format, at any address; bad heads are refused."""

import pytest
import torch

from hadal.comm.codec import Codec, MessageError, check_size, ints, read_head, write_head
from hadal.comm.layout import DISPATCH_FORMATS, HEAD_BYTES, MessageLayout
from hadal.kernels.message import LOW_LATENCY, NORMAL


@pytest.mark.parametrize("dispatch_format", DISPATCH_FORMATS)
@pytest.mark.parametrize("start", [0, 16, 37])
def test_rows_at_any_address(dispatch_format: str, start: int) -> None:
    """Decode at any offset: a received message may lie anywhere in a larger buffer."""
    codec = Codec(MessageLayout(dispatch_format, 200))
    x_TD = torch.randn(6, 200, generator=torch.Generator().manual_seed(1))
    token_N = torch.tensor([5, 0, 0, 3], dtype=torch.int32)
    stride = codec.layout.row_bytes + 4
    message = torch.full((start + 4 * stride,), 7, dtype=torch.uint8)
    codec.encode(x_TD, token_N, message, start, stride)
    out_ND = torch.empty(4, 200)
    codec.decode(message, start, stride, out_ND)
    bound = {"fp32": 0.0, "fp8": 1 / 16, "fp8_pow2": 1 / 16}[dispatch_format]
    torch.testing.assert_close(
        out_ND, x_TD[token_N.long()], rtol=bound, atol=0.02 if bound else 0.0
    )
    assert (message[:start] == 7).all()
    assert (message[start:].view(4, stride)[:, -4:] == 7).all()
    codec.encode(x_TD[:0], None, message, len(message), stride)  # No rows, at the very end.


@pytest.mark.parametrize("dispatch_format", DISPATCH_FORMATS)
def test_combine_of_rows_that_came_back(dispatch_format: str) -> None:
    codec = Codec(MessageLayout(dispatch_format, 64))
    y_PD = torch.randn(6, 64, generator=torch.Generator().manual_seed(2))
    back = torch.empty(6 * codec.layout.back_bytes, dtype=torch.uint8)
    codec.encode_back(y_PD, back)
    at_TK = torch.tensor([[4, 1], [0, 2], [3, 5]], dtype=torch.int32)
    ids_TK = torch.tensor([[9, 2], [1, 3], [8, 7]])
    weights_TK = torch.rand(3, 2, generator=torch.Generator().manual_seed(3))
    want = (y_PD[at_TK.long()] * weights_TK[:, :, None]).sum(1)
    tolerance = 1e-6 if dispatch_format == "fp32" else 3e-2
    torch.testing.assert_close(
        codec.combine(back, at_TK, ids_TK, weights_TK), want, rtol=0, atol=tolerance
    )
    assert codec.combine(back[:0], at_TK[:0], ids_TK[:0], weights_TK[:0]).shape == (0, 64)


def test_heads_are_checked() -> None:
    message = torch.zeros(64, dtype=torch.uint8)
    write_head(message, 3, 5, 7, NORMAL)
    assert read_head(message, 7, NORMAL, peer=1) == (3, 5)
    for layer, kind in ((6, NORMAL), (7, LOW_LATENCY)):
        with pytest.raises(MessageError, match="rank 1 sent layer 7"):
            read_head(message, layer, kind, peer=1)
    with pytest.raises(MessageError, match="8 bytes"):
        read_head(message[:8], 7, NORMAL, peer=1)
    with pytest.raises(MessageError, match="rank 1"):
        check_size(message, 65, peer=1)
    write_head(message, 5, 3, 7, NORMAL)
    with pytest.raises(MessageError, match="5 rows of 3 pairs"):
        read_head(message, 7, NORMAL, peer=1)


def test_ints_at_odd_addresses() -> None:
    message = torch.zeros(HEAD_BYTES + 1, dtype=torch.uint8)
    message[1:5] = torch.tensor([258], dtype=torch.int32).view(torch.uint8)
    assert ints(message[1:], 0, 1).tolist() == [258]
