"""Parts shared by prefill and decode leaders: reports, steps in flight, schedules, disk writes."""
