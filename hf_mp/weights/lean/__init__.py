"""The lean layouts: parameters in 16 bits, and the 16 bits more that make them FP32 masters."""
