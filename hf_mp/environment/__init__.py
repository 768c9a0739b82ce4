"""What mixed precision this machine supports, and the preset that suits it: ``hf-mp env``."""
