"""DeepSeek-V3 as in its paper, on torch: weights and tokens in, logits out. Independent of sockets
and the scheduler.
"""
