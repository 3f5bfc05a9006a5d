"""Transfers of KV between pools (shared memory, NIXL, TCP) and of experts between ranks (TCP)."""
