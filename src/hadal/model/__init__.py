"""DeepSeek-V3 on torch: weights and tokens in, logits out. Independent of sockets and the
scheduler.
"""
