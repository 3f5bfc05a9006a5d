"""DeepSeek-V3 as in the paper, on torch: weights in, tokens in, logits out. Knows no sockets and no
scheduler.
"""
