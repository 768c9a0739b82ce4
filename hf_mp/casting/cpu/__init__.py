"""Fast matmuls and attention for CPUs without 16-bit arithmetic."""
