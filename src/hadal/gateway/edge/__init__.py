"""Rules for every HTTP request, independent of its endpoint."""
