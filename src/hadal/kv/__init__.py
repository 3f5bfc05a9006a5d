"""Bookkeeping of KV blocks: owners, leases, names, free space. The bytes are moved by other packages."""
