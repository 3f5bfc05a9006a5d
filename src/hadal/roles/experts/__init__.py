"""The placing of experts while a unit serves: windows of loads, what a change gains, installations."""
