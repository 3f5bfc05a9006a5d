"""Expert placement while a unit serves: windows of loads, gains of changes, installations."""
