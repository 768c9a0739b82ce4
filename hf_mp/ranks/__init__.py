"""What several processes need: DDP, FSDP2 and tensor parallelism."""
