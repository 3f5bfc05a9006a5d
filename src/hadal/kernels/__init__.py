"""Fast ops, one per file, each with the name and signature of its slow twin in `hadal.reference`."""
