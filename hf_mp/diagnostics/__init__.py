"""What happened to the numbers: who overflowed first, and why."""
