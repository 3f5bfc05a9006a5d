"""What the leaders of prefill and decode share: reports, steps in flight, schedules, stores to disk."""
