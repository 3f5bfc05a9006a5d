"""What a plan costs in seconds: pure arithmetic over measured or sourced times."""
