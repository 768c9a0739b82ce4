"""FP32 master weights for FP16/BF16 parameters: held whole by an optimizer wrapper, or split into 16 + 16 bits."""
