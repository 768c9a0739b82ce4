"""FP32 master weights and FP16/BF16 working copies: layouts, parameter slots, optimizer wrapper, split parameters."""
