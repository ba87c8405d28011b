"""Which request runs when: pure decisions on costs, queues and windows, without a clock, a loop or a thread."""
