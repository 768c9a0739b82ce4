"""Fast forms of products and attention on CPUs without 16-bit arithmetic."""
