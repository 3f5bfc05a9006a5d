"""DeepSeek-V3 as in the paper, on torch: weights and tokens in, logits out. Independent of sockets
and of the scheduler.
"""
