"""What this machine can do in mixed precision, and which preset suits it: ``hf-mp env``."""
