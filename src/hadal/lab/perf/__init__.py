"""Step model of GPUs: rooflines, links and layers, fitted to measured tables."""
