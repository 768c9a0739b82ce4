"""What is there for other libraries' sake: accelerate, and torch's clipping by value."""
