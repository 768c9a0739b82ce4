"""Process groups: DDP, FSDP2 and tensor parallelism."""
