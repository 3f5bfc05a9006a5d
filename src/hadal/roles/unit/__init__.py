"""What the leaders of prefill and decode share: steps in flight, schedules, stores to disk."""
