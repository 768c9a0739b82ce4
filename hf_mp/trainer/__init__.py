"""Mixed precision for Hugging Face's Trainer: subclass, callback, checkpoints."""

from hf_mp.environment.libraries import quiet_bitsandbytes

with quiet_bitsandbytes():
    import transformers.trainer  # noqa: F401
