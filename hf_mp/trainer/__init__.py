"""Mixed precision for Hugging Face's Trainer: subclass, callback, checkpoints."""
